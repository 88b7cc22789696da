"""What is wrong with the ranks of a monitored command: a slow one and why, a slow loader, memory that grows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from samestep.message import Message, message
from samestep.records.monitor import RankUse
from samestep.report.figures.data_wait import Waiting
from samestep.report.numbers import size

LEAST_STEPS, LEAST_S = 10, 5.0  # that are judged
LATE_SHARE = 0.15  # of the time, that the others wait for one rank
WHY_SHARE = 0.5  # of that time, which differences must explain
RIVAL_SHARE = 0.5  # of the greatest difference: another one may be the reason as well
CHANCE = 2.0  # standard deviations, of equal shares, by which more looks find a late rank at a line than another one
QUEUE_SHARE = 0.2  # of the time, waiting for a processor
UNSEEN_QUEUE = 2  # times that, which the others wait for a rank that is slow for no reason that is measured
LOADER_SHARE = 0.2  # of the time, waiting for data on all ranks
COMMUNICATION_SHARE = 0.5  # of the time, neither loading nor computing on any rank
GROWTH, GROWTH_BYTES = 1.5, 256 << 20  # times, and bytes, by which memory grows after the first steps
GROWN_SHARE = 0.5  # of that growth, which a rank and its workers have together


def findings(ranks: Sequence[RankUse], cores: float, *, on_gpus: bool = False) -> Iterator[Message]:
    """Yields what is wrong. cores: of the machine. on_gpus: whether kernels run beside the thread that is measured."""
    judged = _judged(ranks)
    if judged:
        late, queue_share = _late(judged), statistics.mean(rank.queue_s / rank.seconds for rank in judged)
        # Where all wait for processors, it may be chance which of them comes last: its other threads, as those that
        # communicate, wait as well, and only the one that trains is measured.
        if late and ((late.late_share or 0.0) > UNSEEN_QUEUE * queue_share or unexplained(ranks) is None):
            yield _slow(late, [rank for rank in judged if rank is not late])
        elif queue_share >= QUEUE_SHARE:
            yield message("ranks_wait_for_processors", share=queue_share)
        elif waiting := loader_bound(judged, cores):
            yield waiting
        elif len(judged) > 1 and not on_gpus and _mostly_communicate(judged):
            step = statistics.mean(rank.seconds / rank.steps for rank in judged)
            yield message("ranks_mostly_communicate", share=min(map(_other_share, judged)), step_ms=1e3 * step)
    for rank in ranks:
        yield from _growth(rank)


def extra_contexts(pids: Mapping[int, int], contexts: Sequence[Mapping[int, int]]) -> Message | None:
    """Returns which ranks hold a context on GPU 0 beside that on their own GPU. pids: rank -> its pid. contexts: of
    each GPU, pid -> bytes."""
    elsewhere = {pid for held in contexts[1:] for pid in held}
    extra = {
        rank: contexts[0][pid] for rank, pid in pids.items() if contexts and pid in contexts[0] and pid in elsewhere
    }
    if not extra:
        return None
    return message("ranks_hold_a_context_on_gpu_0", ranks=sorted(extra), memory=size(max(extra.values())))


def loader_bound(ranks: Sequence[RankUse], cores: float) -> Message | None:
    """Returns how much the training waits for data, and which setting would shorten that; None where it does not."""
    steps, seconds = sum(rank.steps for rank in ranks), sum(rank.seconds for rank in ranks)
    first_s, loading_s = sum(rank.first_loading_s for rank in ranks), sum(rank.loading_s for rank in ranks)
    waiting = Waiting(
        step_s=seconds / steps,
        wait_s=(loading_s - first_s) / steps,
        fetch_s=sum(rank.fetch_s for rank in ranks) / steps,
        fetch_cpu_s=sum(rank.fetch_cpu_s for rank in ranks) / steps,
        rows=0,
        workers=max(rank.workers for rank in ranks),
        prefetch=max(rank.prefetch for rank in ranks),
        cores=cores / len(ranks),
        of_script=True,
    )
    if first_s / seconds >= LOADER_SHARE and first_s > loading_s / 2:
        workers = waiting.workers or None
        return message("training_waits_for_first_batches", share=first_s / seconds, workers=workers)
    if waiting.share < LOADER_SHARE or not waiting.fetch_s:
        return None
    return message("training_waits_for_its_loader", share=waiting.share, advice=waiting.advice())


def unexplained(ranks: Sequence[RankUse]) -> int | None:
    """Returns the rank that the others wait for, where no part of its step says why: its stack may."""
    judged = _judged(ranks)
    late = _late(judged)
    if late is None:
        return None
    return None if _parts(late, [rank for rank in judged if rank is not late]) else late.rank


def _judged(ranks: Sequence[RankUse]) -> list[RankUse]:
    return [rank for rank in ranks if rank.steps >= LEAST_STEPS and rank.seconds >= LEAST_S]


def _late(judged: Sequence[RankUse]) -> RankUse | None:
    """Returns the rank that the others wait for. Where ranks take turns at being the last, as on a busy machine, it is
    none: no rank is slower than the others."""
    by_share = sorted(judged, key=lambda rank: -(rank.late_share or 0.0))
    first, second = ((rank.late_share or 0.0) for rank in by_share[:2]) if len(judged) > 1 else (0.0, 0.0)
    return by_share[0] if first - second >= LATE_SHARE else None


# The parts of a step -> what is said of a rank that takes longer for one than the others.
REASONS = {
    "loading_s": "slow_by_loading",
    "compute_s": "slow_by_computing",
    "queue_s": "slow_by_waiting_for_a_processor",
}


def _parts(late: RankUse, other_ranks: Sequence[RankUse]) -> list[Message]:
    """Returns why the others wait for a rank: the parts of its step that are longer than theirs, the longest first.

    One that is half as much longer as another may be the reason as well; what is less is not named.
    """
    late_s = (late.late_share or 0.0) * late.seconds / late.steps
    excess, reasons = {}, {}
    for name, reason in REASONS.items():
        its_s = getattr(late, name) / late.steps
        theirs_s = statistics.median(getattr(rank, name) / rank.steps for rank in other_ranks)
        excess[name] = its_s - theirs_s
        reasons[name] = Message(reason, {"its_ms": 1e3 * its_s, "theirs_ms": 1e3 * theirs_s})
    most = max(excess.values())
    names = {name for name in excess if excess[name] >= RIVAL_SHARE * most > 0}
    # A thread that computes for longer also waits for longer where others use the processors: the one may be the other.
    if "queue_s" in names and excess["compute_s"] >= RIVAL_SHARE * (late.compute_s / late.steps):
        names.add("compute_s")
    if sum(excess[name] for name in names) < WHY_SHARE * late_s:
        return []
    return [reasons[name] for name in sorted(names, key=lambda name: -excess[name])]


def _slow(late: RankUse, other_ranks: Sequence[RankUse]) -> Message:
    """Returns that the others wait for a rank, and why as far as it is known."""
    step_s = late.seconds / late.steps
    parts = _parts(late, other_ranks)
    if not parts:
        at_line, others_at_line = late.looks_at_line, late.others_at_line
        is_known = at_line > others_at_line and at_line - others_at_line >= CHANCE * math.sqrt(at_line + others_at_line)
        line, often, looks = (late.line, late.looks_at_line, late.looks) if is_known else (None, None, None)
        why = message("slow_outside_of_loading_and_computing", often=often, looks=looks, line=line)
    elif len(parts) == 1:
        why = parts[0]
    else:
        why = message("slow_by_one_of_several", first=parts[0], second=parts[1])
    late_ms = 1e3 * (late.late_share or 0.0) * step_s
    return message("rank_is_slow", rank=late.rank, late_ms=late_ms, step_ms=1e3 * step_s, why=why)


def _mostly_communicate(judged: Sequence[RankUse]) -> bool:
    """Whether all do, and no rank is waited for, even in turn, as far as that is known."""
    if any(rank.sends or rank.late_share is None for rank in judged):
        return False
    late_share = max(rank.late_share or 0.0 for rank in judged)
    return late_share < LATE_SHARE and min(map(_other_share, judged)) >= COMMUNICATION_SHARE


def _other_share(rank: RankUse) -> float:
    """The part of a rank's time in which it neither loads nor computes nor waits for a processor."""
    return max(0.0, 1 - (rank.loading_s + rank.compute_s + rank.queue_s) / rank.seconds)


def _growth(rank: RankUse) -> Iterator[Message]:
    """Yields what grows. Workers that start share the rank's pages, and those that end leave it alone with them: what
    the rank has less then they have more, so that only what both have together counts."""
    rank_growth, workers = rank.memory - rank.first_memory, rank.workers_memory - rank.workers_first_memory
    if rank_growth + workers < GROWN_SHARE * max(rank_growth, workers):
        return
    # A page that a worker copies was in its resident set before. More workers have no more each.
    copied = (rank.worker_resident - rank.worker_first_resident) * rank.worker_processes < workers / 2
    if _grows(rank.workers_first_memory, rank.workers_memory):
        first, now = size(rank.workers_first_memory), size(rank.workers_memory)
        id = "workers_copy_the_dataset" if copied else "memory_of_workers_grows"
        yield Message(id, {"rank": rank.rank, "first": first, "now": now, "steps": rank.steps})
        if copied:
            return
    if _grows(rank.first_memory, rank.memory):
        first, now = size(rank.first_memory), size(rank.memory)
        yield message("memory_of_rank_grows", rank=rank.rank, first=first, now=now, steps=rank.steps)


def _grows(first: int, now: int) -> bool:
    return first > 0 and now > max(GROWTH * first, first + GROWTH_BYTES)
