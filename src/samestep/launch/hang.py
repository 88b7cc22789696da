"""Decides which ranks the others wait for. A pure function of what is known of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from samestep.launch.hung_rank import Collective, HungRank
from samestep.message import Message, message

NAMED = 3  # ranks at fault whose lines are told

NONE_ENDED: Mapping[int, int] = {}
Waiting = Mapping[int, Collective]  # rank -> the collective that it waits in
Fault = Literal["rank_is_stopped", "rank_has_not_entered_collective", "rank_has_done_nothing"]


@dataclass(frozen=True)
class Hang:
    """Why the training hangs. ranks: those at fault; none where no rank of this machine is."""

    ranks: tuple[int, ...]
    message: Message


def explain(ranks: Sequence[HungRank], size: int, ended: Mapping[int, int] = NONE_ENDED) -> Hang:
    """Returns the ranks that the others wait for.

    ranks: those of this machine that have not ended. size: all ranks. ended: those of this machine that have, with
    their optimizer steps.
    """
    stopped = [rank for rank in ranks if rank.at_work().is_stopped]
    waiting = {rank.rank: collective for rank in ranks if (collective := _waits_in(rank))}
    if stopped:
        return _at_fault("rank_is_stopped", stopped, ranks, waiting)
    behind, collective = _behind(ranks, waiting)
    if behind and collective:
        return _at_fault("rank_has_not_entered_collective", behind, ranks, waiting, collective)
    if rare := _in_rare_collectives(ranks, waiting):
        return _mismatch(rare, ranks, waiting)
    if waiting and len(waiting) == len(ranks):
        return _ended(ranks, waiting, ended) if ended else _elsewhere(ranks, waiting, size)
    return _at_fault("rank_has_done_nothing", _late(ranks, waiting), ranks, waiting)


def _waits_in(rank: HungRank) -> Collective | None:
    return rank.recorded.first_waiting if rank.recorded else None


def _behind(ranks: Sequence[HungRank], waiting: Waiting) -> tuple[list[HungRank], Collective | None]:
    """Returns the ranks that have not entered a collective in which another one waits, and that collective."""
    for collective in sorted(waiting.values(), key=lambda entered: entered.created_ns):
        group, number = collective.group, collective.number
        unknown = 0 if collective.is_default else number  # of a rank that may not be of the group
        last = {rank.rank: rank.recorded.last.get(group, unknown) for rank in ranks if rank.recorded}
        behind = [rank for rank in ranks if last.get(rank.rank, number) < number]
        if behind:
            # A rank may itself wait for another one that is further behind.
            least = min(last[rank.rank] for rank in behind)
            return [rank for rank in behind if last[rank.rank] == least], collective
    return [], None


def _in_rare_collectives(ranks: Sequence[HungRank], waiting: Waiting) -> list[HungRank]:
    """Returns the ranks that wait in another collective than most, under the same number.

    Where as many wait in the one as in the other, those that wait in a line of the user's code: an engine's own
    collectives are the same on each rank. Where all do, those that wait in another than the first rank.
    """
    kinds = Counter(collective.what for collective in waiting.values())
    if len(kinds) < 2:
        return []
    fewest = min(kinds.values())
    rare = [rank for rank in ranks if rank.rank in waiting and kinds[waiting[rank.rank].what] == fewest]
    if len(set(kinds.values())) == 1:
        rare = [rank for rank in rare if rank.process.frame()] or rare
        if {waiting[rank.rank].what for rank in rare} == kinds.keys():
            usual = waiting[min(waiting)].what
            rare = [rank for rank in rare if waiting[rank.rank].what != usual]
    return rare


def _late(ranks: Sequence[HungRank], waiting: Waiting) -> list[HungRank]:
    """Returns the ranks that seem to be at fault by their stacks and activities alone."""
    free = [rank for rank in ranks if rank.rank not in waiting and not rank.waits_in_library] or list(ranks)
    progress = {rank.rank: (rank.pulse.step, rank.pulse.activity) for rank in free}
    first = [rank for rank in free if progress[rank.rank] == min(progress.values())]
    in_users_code = [rank for rank in first if rank.at_work().frame()]
    return in_users_code or first


def _at_fault(
    fault: Fault,
    culprits: Sequence[HungRank],
    ranks: Sequence[HungRank],
    waiting: Waiting,
    collective: Collective | None = None,
) -> Hang:
    """Names the ranks at fault, with where the first of them are, and those that wait for them.

    collective: that the ranks at fault have not entered; None: the one that the first waiting rank is in.
    """
    blamed = tuple(rank.rank for rank in culprits)
    waits = [rank.rank for rank in ranks if rank.rank in waiting and rank.rank not in blamed]
    collective = collective or (waiting[waits[0]] if waits else None)
    places = [rank.place for rank in culprits[:NAMED]] + [None] * NAMED
    fields = {
        "ranks": blamed,
        "silent_s": culprits[0].silent_s,
        "collective": collective and str(collective),
        "waiting": waits,
        "first": places[0],
        "second": places[1],
        "third": places[2],
    }
    return Hang(blamed, Message(fault, fields))


def _mismatch(rare: Sequence[HungRank], ranks: Sequence[HungRank], waiting: Waiting) -> Hang:
    blamed = tuple(rank.rank for rank in rare)
    usual = [rank for rank in ranks if rank.rank in waiting and rank.rank not in blamed]
    rare_collective, usual_collective = waiting[rare[0].rank], waiting[usual[0].rank]
    by_size = rare_collective.operation == usual_collective.operation
    said = message(
        "ranks_wait_in_different_collectives",
        rank=rare[0].rank,
        silent_s=rare[0].silent_s,
        collective=str(rare_collective),
        sizes=_sizes(rare_collective) if by_size else None,
        place=rare[0].place,
        others=[rank.rank for rank in usual],
        others_collective=str(usual_collective),
        others_sizes=_sizes(usual_collective) if by_size else None,
        others_place=usual[0].place,
    )
    return Hang(blamed, said)


def _sizes(collective: Collective) -> list[str]:
    return [str(list(size)) for size in collective.sizes] or ["[]"]


def _ended(ranks: Sequence[HungRank], waiting: Waiting, ended: Mapping[int, int]) -> Hang:
    first = ranks[0]
    said = message(
        "ranks_wait_for_one_that_has_ended",
        ended=sorted(ended),
        steps=min(ended.values()),
        ranks=[rank.rank for rank in ranks],
        collective=str(waiting[first.rank]),
        silent_s=first.silent_s,
        place=first.place,
    )
    return Hang(tuple(sorted(ended)), said)


def _elsewhere(ranks: Sequence[HungRank], waiting: Waiting, size: int) -> Hang:
    waits = [rank.rank for rank in ranks]
    collective, silent_s = str(waiting[waits[0]]), ranks[0].silent_s
    if len(ranks) < size:
        said = message("ranks_wait_for_another_machine", ranks=waits, collective=collective, silent_s=silent_s)
    else:
        said = message(
            "every_rank_waits_in_one_collective",
            ranks=waits,
            collective=collective,
            silent_s=silent_s,
            first=ranks[0].place,
        )
    return Hang((), said)
