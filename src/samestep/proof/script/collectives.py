"""Whether all ranks of a group call the same collectives in the same order."""

from __future__ import annotations

from collections.abc import Sequence

from samestep.proof.script.updates import Ranks, differs, many
from samestep.records.beside_steps import GroupSeen
from samestep.records.script import Finding

QUESTION = "collectives"
WORLD = "0"  # torch's name of the default group
ALIKE = ("all_reduce", "allreduce", "broadcast", "reduce")  # whose inputs have one shape on all ranks
CAUSE = (
    "the ranks call their collectives in another order, or with other tensors: what one sends, another receives as "
    "something else (a condition on the rank, a set or dict of another order, a parameter that one rank leaves out)"
)


def collectives(ranks: Ranks) -> Finding:
    """Answers whether the ranks of each process group have called the same collectives, as far as all have come."""
    names = list(dict.fromkeys(name for rank in ranks for name in rank.groups))
    if len(ranks) == 1:
        return Finding(QUESTION, "right", "one rank")
    if not names:
        return Finding(QUESTION, "unknown", "torch has recorded no collectives")
    count = 0
    for name in names:
        members = {rank: seen.groups[name] for rank, seen in enumerate(ranks) if name in seen.groups}
        if not _are_one_group(name, members, ranks):
            continue
        wrong = _first_difference([*members.values()])
        if wrong:
            at, calls = wrong
            first = next(i for i, call in enumerate(calls) if _compared(call) != _compared(calls[0]))
            rank = [*members][first]
            shown = {"expected": f"{calls[0]}, as on rank {min(members)}", "found": calls[first]}
            return differs(QUESTION, f"collective {at} of group {name}", CAUSE, rank=rank, **shown)
        count += min(len(each.calls) for each in members.values())
    return Finding(QUESTION, "right", f"{many(count, 'collective')} in the same order on all ranks of their groups")


def _are_one_group(name: str, members: dict[int, GroupSeen], ranks: Ranks) -> bool:
    """Whether these are the records of one group; of groups that were closed only the world's is known."""
    of = [each.ranks for each in members.values()]
    return all(each == [*members] for each in of) or (name == WORLD and len(members) == len(ranks))


def _first_difference(of: Sequence[GroupSeen]) -> tuple[int, list[str]] | None:
    """Returns the number of the first call that is not the same, and the ranks' calls."""
    first = max(each.first for each in of)
    lists = [each.calls[first - each.first :] for each in of]
    for at, calls in enumerate(zip(*lists)):
        if len({_compared(call) for call in calls}) > 1:
            return first + at, [*calls]
    return None


def _compared(call: str) -> str:
    """Returns what must be the same: of most operations the name; a scatter's inputs are on one rank alone."""
    name = call.partition(" ")[0]
    return call if name in ALIKE else name
