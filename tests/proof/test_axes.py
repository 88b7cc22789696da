"""A training that is wrong is tried on parts of its mesh, and its axes and its module are named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from samestep.job.module_outputs import ZEROS
from samestep.message import message
from samestep.proof.axes import origin_of, trial_of, tried_axes
from samestep.proof.modules import first_wrong_output, module_of
from samestep.proof.trace import Expectation, Trace
from samestep.records.inspection import EngineFacts
from samestep.records.origin import AxisTrial, Origin
from samestep.records.results import Divergence, Verdict
from samestep.world.mesh import Mesh

TWO, THREE = Mesh(data=2, tensor=2), Mesh(data=2, shard=2, tensor=2)


def located(mesh: Mesh, wrong: Mapping[tuple[str, ...], bool | None]) -> Origin:
    """Where something is that is wrong on a mesh, and on all parts with these; None: that is not known."""

    def tried(part: Mesh) -> AxisTrial:
        having = [differs for axes, differs in wrong.items() if {*axes} <= {*part.sizes}]
        differs = None if None in having else any(having)
        return AxisTrial(
            (*part.sizes,), str(part), differs, None if differs is not None else message("part_not_inspected")
        )

    return origin_of(tried_axes(mesh, tried))


@pytest.mark.parametrize(
    ("mesh", "wrong", "axes", "said", "launches"),
    [
        (TWO, {("tensor",): True}, ("tensor",), "wrong_along_axes", 4),
        (TWO, {("data",): True, ("tensor",): True}, ("data", "tensor"), "wrong_along_axes", 4),
        (TWO, {("data", "tensor"): True}, ("data", "tensor"), "wrong_along_axes_together", 4),
        (TWO, {(): True}, (), "wrong_on_one_rank", 2),
        (TWO, {(): False}, (), "not_wrong_when_tried_again", 1),
        (TWO, {("data", "tensor"): None}, (), "axes_not_tried", 1),
        (Mesh(stage=3), {("stage",): True}, ("stage",), "wrong_along_axis", 2),
        (THREE, {("shard",): True}, ("shard",), "wrong_along_axes", 6),
        (THREE, {("data", "tensor"): True}, ("data", "tensor"), "wrong_along_axes", 8),
    ],
    ids=str,
)
def test_the_smallest_parts_that_are_wrong_are_its_axes(
    mesh: Mesh, wrong: Mapping[tuple[str, ...], bool | None], axes: Sequence[str], said: str, launches: int
) -> None:
    origin = located(mesh, wrong)
    assert (origin.axes, origin.said[0].id, len(origin.trials)) == (axes, said, launches)


def test_what_could_not_be_tried_is_said() -> None:
    def tried(part: Mesh) -> AxisTrial:
        differs = {"": False, "data=2": None}.get(str(part), True)
        return AxisTrial((*part.sizes,), str(part), differs, message("part_not_inspected") if differs is None else None)

    (said,) = origin_of(tried_axes(TWO, tried)).said
    assert said.fields["parts"] == ["tensor=2"] and said.fields["untried"] == ["data=2"]
    assert said.fields["why"].id == "part_not_inspected"
    trials = [
        AxisTrial(("data", "tensor"), str(TWO), True),
        AxisTrial((), "", None),
        AxisTrial(("data",), "data=2", False),
    ]
    assert origin_of(trials).said[0].id == "axes_not_known" and origin_of(trials).axes == ()


OUTPUTS = {name: np.sort(np.random.default_rng(number).normal(size=8)) for number, name in enumerate("abc")}


def parts(changed: str = "", by: float = 0.0) -> list[dict[str, Any]]:
    """Outputs of two ranks: each has half of 'a', all of 'b', and a part of 'c' that is no share of it."""
    whole = {name: values + (by if name == changed else 0.0) for name, values in OUTPUTS.items()}
    return [{"a": whole["a"][rank::2], "b": whole["b"], "c": whole["c"][:3]} for rank in range(2)]


def test_a_deadline_shows_nothing_of_a_part() -> None:
    """How busy the machine is names no axis, also where the whole launch was ended by its deadline."""
    played = cast(Expectation, SimpleNamespace(facts=SimpleNamespace(not_played={})))
    for said, expected in (("rank_raised", True), ("launch_reached_its_deadline", None)):
        failed, verdict = message(said), Verdict("failed", reason=message(said))
        trial = trial_of(Mesh(tensor=2), cast(EngineFacts, None), verdict, played, lambda failed=failed: failed)
        assert trial.differs is expected


def test_outputs_are_compared_however_they_are_divided() -> None:
    assert first_wrong_output(OUTPUTS, parts()) == (None, 2)
    for module in "ab":
        assert first_wrong_output(OUTPUTS, parts(module, 1e-6))[0] == module
        assert first_wrong_output(OUTPUTS, parts(module, float("nan")))[0] == module
    assert first_wrong_output(OUTPUTS, parts("c", 1.0)) == (None, 2)  # not compared: no false comfort


def test_outputs_of_zeros_alone_count_where_others_are_missing() -> None:
    half = {name: values[:4] for name, values in OUTPUTS.items()}
    zeros = {f"{ZEROS}b": np.array([4])}
    assert first_wrong_output(OUTPUTS, [{**half, "a": OUTPUTS["a"]}]) == (None, 1)
    assert first_wrong_output(OUTPUTS, [{**half, "a": OUTPUTS["a"], **zeros}])[0] == "b"
    placeholders = {f"{ZEROS}a": np.array([8]), f"{ZEROS}b": np.array([8])}
    assert first_wrong_output(OUTPUTS, [OUTPUTS | placeholders]) == (None, 3)


TRAINED = ["a.weight", "b.weight", "c.weight"]
# Rank 1 alone has 'c'.
OBSERVED = cast(Trace, SimpleNamespace(mesh=Mesh(stage=2), divided={"c.weight": {"stage": frozenset({1})}}))


def difference(quantity: str, tensor: str | None = None, rank: int | None = None, step: int = 0) -> Divergence:
    return Divergence("gradient", step, quantity, tensor=tensor, rank=rank, expected=0, found=1)


@pytest.mark.parametrize(
    ("differences", "module", "said"),
    [
        ([difference("first gradient", "a.weight"), difference("first gradient", "b.weight")], "b", "tensors"),
        ([difference("first gradient", name) for name in TRAINED], "", None),
        ([difference("replicas", "b.weight from [0]")], "b", "tensors"),
        ([difference("optimizer steps", rank=1)], "c", "ranks"),
        ([difference("optimizer steps", rank=0)], "", None),
        ([difference("loss", step=1)], "", None),
        ([difference("rows", rank=1)], "", None),
    ],
)
def test_the_module_is_the_last_one_whose_tensors_are_wrong(
    differences: list[Divergence], module: str, said: str | None
) -> None:
    named, told = module_of(differences, OBSERVED, TRAINED, OUTPUTS, parts())
    assert (named, told and told.id) == (module, said and f"{said}_wrong_from_module")
    assert module_of(differences, OBSERVED, TRAINED, {}, [])[0] == module  # in the order of the model


def test_a_wrong_loss_is_of_the_first_wrong_output_or_after_all() -> None:
    first = [difference("loss", rank=0)]
    assert module_of(first, OBSERVED, TRAINED, OUTPUTS, parts("b", 1.0))[0] == "b"
    module, told = module_of(first, OBSERVED, TRAINED, OUTPUTS, parts())
    assert (module, told and told.fields) == ("loss", {"modules": 2})
    assert module_of(first, OBSERVED, TRAINED, {}, []) == ("", None)
