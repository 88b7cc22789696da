"""The table of environment variables: what each entry needs to be judged and to be said."""

from __future__ import annotations

from samestep.doctor.probes.variables import known_variables
from samestep.report import language


def test_each_variable_has_a_meaning_or_another_name() -> None:
    variables = known_variables()
    for name, known in variables.items():
        assert name.isupper() and known.needs in ("", "gpu", "infiniband"), name
        assert bool(known.en and known.zh) != bool(known.instead), name
        assert not known.instead or variables[known.instead].en, name
        assert set(known.slows) <= set(known.values) and bool(known.slows) == bool(known.cost), name
        assert not known.cost or known.cost in language.catalogue(), name
    assert len(variables) > 200
