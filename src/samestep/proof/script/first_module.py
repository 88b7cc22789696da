"""Which module of the ranks' first training forward computes something else than one process's does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from samestep.message import message
from samestep.proof.script.findings import Ranks
from samestep.records.script import Finding, ScriptRecord

SAME_SUMS = 1e-4
# What a module that computes something else does to the ranks of a replica, or to the gradient against one process.
OF_A_MODULE = ("replica_gradient_apart", "replica_is_no_one_process", "later_gradients_apart")


def with_module(finding: Finding, ranks: Ranks, one_process: ScriptRecord, axis: str, size: int) -> Finding:
    """Returns a finding about gradients; where a module computes something else on the `size` ranks along an axis, with
    that as its cause."""
    if finding.message.id not in OF_A_MODULE or not (module := first_module_apart(ranks, one_process)):
        return finding
    cause = message("module_computes_otherwise", axis=axis, module=module, ranks=size)
    divergence = replace(finding.divergence, cause=cause) if finding.divergence else None
    return at_module(replace(finding, message=cause, divergence=divergence), ranks)


def at_module(finding: Finding, ranks: Ranks) -> Finding:
    """Returns a finding about a module with the line where its forward begins."""
    name = finding.message.fields.get("module")
    sites = [module.site for rank in ranks for module in rank.modules if module.name == name and module.site]
    return replace(finding, sites=sites[:1]) if name and sites else finding


def first_module_apart(ranks: Ranks, one_process: ScriptRecord) -> str | None:
    """Returns the first module that was given what one process gives it, put together over the ranks, and returned
    something else; None where none has, or they cannot be told apart.

    A module that returns sums which are still to be added up over the ranks is right where one around it returns what
    one process does, and else the first.
    """
    of_ranks, partial = [_by_call(rank) for rank in ranks], list[str]()
    for call, (given, returned) in _by_call(one_process).items():
        if not all(call in of_rank for of_rank in of_ranks):
            continue
        parts = [[of_rank[call][side] for of_rank in of_ranks] for side in (0, 1)]
        are_given, are_returned = (_are_together(*pair) for pair in zip(parts, (given, returned)))
        if are_returned and returned[0]:
            partial = [name for name in partial if not _is_inside(name, call[0])]
        if are_given and are_returned is False:
            if not _are_partial(parts[1], returned):
                return next((name for name in partial if _is_inside(name, call[0])), call[0])
            partial.append(call[0])
    return partial[0] if partial else None


def _is_inside(name: str, module: str) -> bool:
    return name.startswith(f"{module}." if module else "") and name != module


Sums = tuple[int, list[float]]


def _by_call(rank: ScriptRecord) -> dict[tuple[str, int], tuple[Sums, Sums]]:
    """Returns (module, the number of its call) -> what it was given and what it returned."""
    calls = dict[tuple[str, int], tuple[Sums, Sums]]()
    for module in rank.modules:
        number = sum(name == module.name for name, _ in calls)
        sums = ((side.count, side.sums) for side in (module.given, module.returned))
        calls[module.name, number] = next(sums), next(sums)
    return calls


def _are_together(parts: Sequence[Sums], whole: Sums) -> bool | None:
    """Whether the elements of all ranks are those of one process, each as often as there are copies; None where they
    are no whole number of copies."""
    count, sums = whole
    total = sum(part[0] for part in parts)
    if not count and not total:
        return True
    if not count or total % count or total // count > len(parts):
        return None
    copies, size = total // count, max(sums[1], 1e-12)
    added = [sum(values) / copies for values in zip(*(part[1] for part in parts))]
    near = abs(added[0] - sums[0]) <= SAME_SUMS * size and abs(added[1] - sums[1]) <= SAME_SUMS * size
    return bool(near and abs(added[2] - sums[2]) <= SAME_SUMS * max(sums[2], 1e-12))


def _are_partial(parts: Sequence[Sums], whole: Sums) -> bool:
    """Whether the elements of one process are the sums over ranks of theirs, of which each has another part."""
    count, sums = whole
    total = sum(part[0] for part in parts)
    size = max(sum(part[1][1] for part in parts), 1e-12)
    is_sum = abs(sum(part[1][0] for part in parts) - sums[0]) <= SAME_SUMS * size
    return bool(is_sum and total > count and any(part[1] != parts[0][1] for part in parts))
