"""What is wrong with the ranks of a monitored command: a slow one and why, a slow loader, memory that grows."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from samestep.message import Message, message
from samestep.records.monitor import RankUse
from samestep.report.figures.data_wait import Waiting
from samestep.report.numbers import size

LEAST_STEPS, LEAST_S = 10, 5.0  # that are judged
LATE_SHARE = 0.15  # of the time, that the others wait for one rank
WHY_SHARE = 0.5  # of that time, which a difference must explain
LOADER_SHARE = 0.2  # of the time, waiting for data on all ranks
COMMUNICATION_SHARE = 0.5  # of the time, neither loading nor computing on any rank
GROWTH, GROWTH_BYTES = 1.5, 256 << 20  # times, and bytes, by which memory grows after the first steps


def findings(ranks: Sequence[RankUse], cores: float, *, on_gpus: bool = False) -> Iterator[Message]:
    """Yields what is wrong. cores: of the machine. on_gpus: whether kernels run beside the thread that is measured."""
    judged = [rank for rank in ranks if rank.steps >= LEAST_STEPS and rank.seconds >= LEAST_S]
    if judged:
        late = max(judged, key=lambda rank: rank.late_share or 0.0)
        if len(judged) > 1 and (late.late_share or 0.0) >= LATE_SHARE:
            yield _slow(late, [rank for rank in judged if rank is not late])
        elif waiting := loader_bound(judged, cores):
            yield waiting
        elif len(judged) > 1 and not on_gpus and min(map(_other_share, judged)) >= COMMUNICATION_SHARE:
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
    steps = sum(rank.steps for rank in ranks)
    waiting = Waiting(
        step_s=sum(rank.seconds for rank in ranks) / steps,
        wait_s=sum(rank.loading_s for rank in ranks) / steps,
        fetch_s=sum(rank.fetch_s for rank in ranks) / steps,
        fetch_cpu_s=sum(rank.fetch_cpu_s for rank in ranks) / steps,
        rows=0,
        workers=max(rank.workers for rank in ranks),
        prefetch=max(rank.prefetch for rank in ranks),
        cores=cores / len(ranks),
        of_script=True,
    )
    if waiting.share < LOADER_SHARE or not waiting.fetch_s:
        return None
    return message("training_waits_for_its_loader", share=waiting.share, advice=waiting.advice())


def _slow(late: RankUse, others: Sequence[RankUse]) -> Message:
    """Returns why the others wait for a rank: the part of its step that is longer than theirs."""
    step_s = late.seconds / late.steps
    late_s = (late.late_share or 0.0) * step_s
    parts = {
        name: (getattr(late, name) / late.steps, statistics.median(getattr(rank, name) / rank.steps for rank in others))
        for name in ("loading_s", "compute_s", "queue_s")
    }
    name = max(parts, key=lambda part: parts[part][0] - parts[part][1])
    its_s, theirs_s = parts[name]
    explained = its_s - theirs_s >= WHY_SHARE * late_s
    fields = {"its_ms": 1e3 * its_s, "theirs_ms": 1e3 * theirs_s}
    if not explained:
        why = message("slow_outside_of_loading_and_computing")
    elif name == "loading_s":
        why = Message("slow_by_loading", fields)
    elif name == "compute_s":
        why = Message("slow_by_computing", fields)
    else:
        why = Message("slow_by_waiting_for_a_processor", fields)
    return message("rank_is_slow", rank=late.rank, late_ms=1e3 * late_s, step_ms=1e3 * step_s, why=why)


def _other_share(rank: RankUse) -> float:
    """The part of a rank's time in which it neither loads nor computes nor waits for a processor."""
    return max(0.0, 1 - (rank.loading_s + rank.compute_s + rank.queue_s) / rank.seconds)


def _growth(rank: RankUse) -> Iterator[Message]:
    if _grows(rank.workers_first_memory, rank.workers_memory):
        first, now = size(rank.workers_first_memory), size(rank.workers_memory)
        yield message("memory_of_workers_grows", rank=rank.rank, first=first, now=now, steps=rank.steps)
    if _grows(rank.first_memory, rank.memory):
        first, now = size(rank.first_memory), size(rank.memory)
        yield message("memory_of_rank_grows", rank=rank.rank, first=first, now=now, steps=rank.steps)


def _grows(first: int, now: int) -> bool:
    return first > 0 and now > max(GROWTH * first, first + GROWTH_BYTES)
