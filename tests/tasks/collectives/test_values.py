"""Every collective gives what it must, a wrong one is named, and the pages about them are what real ranks held."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import collective_pages as pages
import pytest

from mutations.plant import patched
from planting import Edit, with_patches
from ranks import Ranks
from samestep.proof.collective_values import EXPECTED, judge_values
from samestep.records.collectives import COLLECTIVES, CollectivePlan
from samestep.tasks.collectives.calls import CALLS

# What gloo lacks in torch 2.13, as (collectives, dtypes, reductions).
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
FLOATS, COMPLEX = ("float64", "float32", "float16", "bfloat16"), ("complex64", "complex128")
MOVING = ("broadcast", "scatter", "gather", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single")
GLOO_LACKS = {
    (REDUCING, FLOATS, ("band", "bor", "bxor")),
    (REDUCING, ("int64", "int32", "int8", "uint8", "bool"), ("avg",)),
    (REDUCING, ("int16",), ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")),
    (REDUCING, COMPLEX, ("product", "min", "max", "band", "bor", "bxor")),
    (MOVING, ("int16",), ()),
    (("gather",), COMPLEX, ()),
}
FAULTS = {
    "reduce": ("dist.reduce(tensor, dst=root,", "dist.reduce(tensor, dst=dist.get_global_rank(group, 0),"),
    "all_gather": ("dist.all_gather(outs, tensor", "dist.all_gather(outs[::-1], tensor"),
    "all_to_all_single": ("dist.all_to_all_single(out, tensor", "dist.all_to_all_single(out, tensor.flip(0)"),
    "all_reduce": ("dist.all_reduce(tensor, op=op", "dist.all_reduce(tensor, op=dist.ReduceOp.MAX"),
    "barrier": ("dist.barrier(group=group)", "pass"),
    "broadcast_object_list": ("dist.broadcast_object_list(objects, src=root", "(lambda *_, **__: 0)(objects, src=root"),
}


def judged(pool: Ranks, plan: CollectivePlan):  # type: ignore[no-untyped-def]
    return judge_values(pool.work(plan).ranks[0].collectives, "gloo")


def test_the_tables_have_the_same_collectives() -> None:
    assert {*COLLECTIVES} == {*CALLS} == {*EXPECTED} == {*pages.CHINESE}


def test_every_value_is_right_and_what_gloo_lacks_is_said(ranks: Callable[[int], Ranks]) -> None:
    checked, wrong, lacking = judged(ranks(3), pages.values_plan())
    assert wrong == []
    assert checked > 400
    assert {(each.collectives, each.dtypes, each.reductions) for each in lacking} == GLOO_LACKS
    assert all(each.instead and each.why for each in lacking)


def test_planted_faults_are_found_and_named(tmp_path: Path) -> None:
    """Each in the same copy of the package: they are of different collectives."""
    source = patched(Edit(*FAULTS["reduce"], "tasks/collectives/calls.py"), tmp_path)
    file = source / "samestep" / "tasks" / "collectives" / "calls.py"
    file.write_text(with_patches(file.read_text(), *(Edit(*fault) for fault in list(FAULTS.values())[1:])))
    with Ranks(3, source) as pool:
        _, wrong, _ = judged(pool, pages.values_plan())
    assert {each.collective for each in wrong} == {*FAULTS}
    named = {(each.collective, each.dtype, each.reduction, each.group, each.rank, each.expected) for each in wrong}
    assert ("reduce", "int64", "sum", "world", 1, "[[30, 33, 36]]") in named  # what is found depends on gloo's order
    assert ("barrier", "", "", "world", 0, "[[3]]") in named
    assert {each.group for each in wrong if each.collective == "all_gather"} >= {"world", "sub-group"}


def test_the_pages_are_what_ranks_hold(ranks: Callable[[int], Ranks]) -> None:
    held = ranks(3).work(pages.plan()).ranks[0].collectives
    for language, path in pages.PAGES.items():
        text = pages.page(language, held)
        if os.environ.get("UPDATE"):
            path.write_text(text)
        if not path.exists() or path.read_text() != text:
            pytest.fail(f"{path} is out of date: UPDATE=1 python -m pytest tests/tasks/collectives -k pages")
