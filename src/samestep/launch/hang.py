"""Decides which ranks the others wait for, and says so in one sentence. A pure function of what is known of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.launch.flight_recorder import Collective
from samestep.launch.hung_rank import HungRank, named

PLURAL = {"so is": "so are", "neither has": "neither have"}


@dataclass(frozen=True)
class Hang:
    """Why the training hangs. ranks: those at fault; none where no rank of this machine is."""

    ranks: tuple[int, ...]
    sentence: str


def explain(ranks: Sequence[HungRank], size: int) -> Hang:
    """Returns the ranks that the others wait for. ranks: those of this machine that have not ended. size: all ranks."""
    stopped = [each for each in ranks if each.at_work().is_stopped]
    waiting = {each.rank: wait for each in ranks if (wait := _waits_in(each))}
    if stopped:
        return _blame(stopped, ranks, waiting, "is stopped, as by SIGSTOP, and has done nothing", "so is")
    behind, collective = _behind(ranks, waiting)
    if behind and collective:
        return _blame(behind, ranks, waiting, f"has not entered {collective}", "neither has")
    if other := _in_other_collectives(ranks, waiting):
        return _mismatch(other, ranks, waiting)
    if waiting and len(waiting) == len(ranks):
        return _elsewhere(ranks, waiting, size)
    late = _late(ranks, waiting)
    return _blame(late, ranks, waiting, "has done nothing", "neither has")


def _waits_in(rank: HungRank) -> Collective | None:
    return rank.recorded.first_waiting if rank.recorded else None


def _behind(ranks: Sequence[HungRank], waiting: dict[int, Collective]) -> tuple[list[HungRank], Collective | None]:
    """Returns the ranks that have not entered a collective in which another one waits, and that collective."""
    for wait in sorted(waiting.values(), key=lambda each: each.created_ns):
        behind = [
            each
            for each in ranks
            if each.recorded and each.recorded.last.get(wait.group, 0 if wait.is_default else wait.number) < wait.number
        ]
        if behind:
            # A rank may itself wait for another one that is further behind.
            least = min(each.recorded.last.get(wait.group, 0) for each in behind if each.recorded)
            return [each for each in behind if each.recorded and each.recorded.last.get(wait.group, 0) == least], wait
    return [], None


def _in_other_collectives(ranks: Sequence[HungRank], waiting: dict[int, Collective]) -> list[HungRank]:
    """Returns the ranks that wait in another collective than most, under the same number.

    Where as many wait in the one as in the other, those that wait in a line of the user's code: an engine's own
    collectives are the same on each rank.
    """
    kinds = Counter(wait.what for wait in waiting.values())
    if len(kinds) < 2:
        return []
    fewest = min(kinds.values())
    rare = [each for each in ranks if each.rank in waiting and kinds[waiting[each.rank].what] == fewest]
    if len(set(kinds.values())) == 1:
        rare = [each for each in rare if each.process.frame()] or rare
    return rare


def _late(ranks: Sequence[HungRank], waiting: dict[int, Collective]) -> list[HungRank]:
    """Returns the ranks that seem to be at fault by their stacks and phases alone."""
    free = [each for each in ranks if each.rank not in waiting and not each.waits_in_library] or list(ranks)
    at = {each.rank: (each.pulse.step, each.pulse.activity) for each in free}
    first = [each for each in free if at[each.rank] == min(at.values())]
    in_own_code = [each for each in first if each.at_work().frame()]
    return in_own_code or first


def _blame(
    culprits: Sequence[HungRank], ranks: Sequence[HungRank], waiting: dict[int, Collective], how: str, also: str
) -> Hang:
    """Names the ranks at fault. how: the verb and what follows it, for the first one; also: the verb for the others."""
    first = culprits[0]
    sentence = f"{_who(first)} {how} for {first.silent_s:.0f} s: it is {first.place}"
    for other in culprits[1:3]:
        sentence += f"; {also} {_who(other)}: it is {other.place}"
    if len(culprits) > 3:
        rest = [each.rank for each in culprits[3:]]
        sentence += f"; {also if len(rest) == 1 else PLURAL[also]} {named(rest)}"
    blamed = tuple(each.rank for each in culprits)
    others = [each for each in ranks if each.rank not in blamed]
    sentence += _others(others, waiting, "there" if "entered" in how else "")
    return Hang(blamed, sentence)


def _others(others: Sequence[HungRank], waiting: dict[int, Collective], there: str) -> str:
    wait = [each.rank for each in others if each.rank in waiting]
    if not wait:
        return ""
    where = there or f"in {waiting[wait[0]]}"
    return f"; {named(wait)} wait{'s' if len(wait) == 1 else ''} {where}"


def _mismatch(rare: Sequence[HungRank], ranks: Sequence[HungRank], waiting: dict[int, Collective]) -> Hang:
    blamed = tuple(each.rank for each in rare)
    others = [each for each in ranks if each.rank in waiting and each.rank not in blamed]
    mine, theirs = waiting[rare[0].rank], waiting[others[0].rank]
    by_size = mine.operation == theirs.operation
    mine_is, theirs_is = ((f"{each} of sizes {_sizes(each)}" if by_size else str(each)) for each in (mine, theirs))
    sentence = (
        f"{_who(rare[0])} has waited in {mine_is} for {rare[0].silent_s:.0f} s, {rare[0].place}, while "
        f"{named([each.rank for each in others])} wait{'s' if len(others) == 1 else ''} in {theirs_is}, "
        f"{others[0].place}; every rank must call the same collectives in the same order"
    )
    return Hang(blamed, sentence)


def _sizes(collective: Collective) -> str:
    return ", ".join(str(list(size)) for size in collective.sizes) or "[]"


def _elsewhere(ranks: Sequence[HungRank], waiting: dict[int, Collective], size: int) -> Hang:
    first = ranks[0]
    here = named([each.rank for each in ranks])
    sentence = (
        f"{here} {'has' if len(ranks) == 1 else 'have'} waited in {waiting[first.rank]} for {first.silent_s:.0f} s, "
    )
    if len(ranks) < size:
        sentence += "and no rank of this machine is behind: see what the other machines say, and the links to them"
    else:
        sentence += f"{first.place}, and every rank has entered it: see the links between the ranks"
    return Hang((), sentence)


def _who(rank: HungRank) -> str:
    return f"rank {rank.rank} (host {rank.host}, process {rank.process.pid})"
