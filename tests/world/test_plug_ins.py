"""Plug-ins are found by their names: samestep's own first, then those of other packages, which must be of the kind."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from samestep.errors import UserError
from samestep.world import plug_ins
from samestep.world.mesh import Mesh
from samestep.world.plug_ins import PlugIns

GROUP = "samestep.meshes"
POINTS = [
    EntryPoint("mine", "samestep.world.mesh:AXES", GROUP),
    EntryPoint("mine", "no_such_module", GROUP),
    EntryPoint("ddp", "no_such_module", GROUP),
]


def test_of_one_name_samesteps_own_is_used_and_then_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plug_ins, "entry_points", lambda group: [point for point in POINTS if point.group == group])
    found = PlugIns("samestep.engines", GROUP, "MESH", Mesh)
    assert {"ddp", "fsdp"} < found.own
    assert found.of_other_packages == {"mine": POINTS[0]}
    assert found.shadowed == [POINTS[2]]
    with pytest.raises(UserError) as raised:
        found.load("mine")
    assert raised.value.message.id == "plug_in_declares_none"
    assert raised.value.message.fields == {"constant": "MESH", "type": "Mesh", "module": "samestep.world.mesh"}
