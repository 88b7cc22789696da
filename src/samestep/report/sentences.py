"""Puts the results into words, for the terminal, the figures and the page."""

from __future__ import annotations

from typing import Any

from samestep.records.results import CompareResults, Divergence, EngineResult, Inexactness, Summary
from samestep.report.numbers import MISSING, difference

TRAININGS = {
    "gradient": "one step of plain SGD",
    "sgd": "SGD with momentum",
    "user": "the job's own optimizer",
}
INTERVAL = (
    "A figure is the median over launches, with its 95 % bootstrap interval; "
    "n counts launches, never steps, because the steps of one launch are not independent."
)


def comparable_rows(results: CompareResults) -> list[EngineResult]:
    """The rows whose speed may be compared: proven, and measured."""
    return [row for row in results.engines if row.proven and row.samples_per_second]


def speed(row: EngineResult) -> Summary:
    """The samples/s of one of the `comparable_rows`."""
    assert row.samples_per_second is not None
    return row.samples_per_second


def title(row: EngineResult) -> str:
    """'ddp compress=fp16': the engine, with those of its settings that were changed. 'ddp 2 -> fsdp 3': another one has
    continued its training."""
    name = " ".join([row.engine, *(f"{key}={value}" for key, value in row.settings.items())])
    then = row.continued_by
    return f"{name} {row.replicas} -> {then.engine} {then.replicas}" if then else name


def label(row: EngineResult) -> str:
    """'ddp (torchrun)'"""
    return f"{title(row)} ({row.launcher})" if row.launcher else title(row)


def verdict_text(row: EngineResult) -> str:
    """'same step (bitwise)', 'approximate', 'differs at step 3: loss of rank 1', 'failed', 'refused', 'unavailable'."""
    if row.verdict == "same":
        return "same step (bitwise)" if row.bitwise else "same step"
    divergence = row.first_divergence
    if row.verdict != "differs" or divergence is None:
        return row.verdict
    at_step = "" if divergence.step is None else f" at step {divergence.step}"
    return f"differs{at_step}: {where(divergence)}"


def short_verdict(row: EngineResult) -> str:
    """The verdict in a few words: 'differs at step 3'."""
    return verdict_text(row).partition(":")[0]


def where(divergence: Divergence) -> str:
    """The first thing that differed: 'loss of rank 1', 'first gradient of conv1.weight'."""
    rank = "" if divergence.rank is None else f"rank {divergence.rank}"
    if divergence.tensor is None:
        return f"{divergence.quantity} of {rank}" if rank else divergence.quantity
    return f"{divergence.quantity} of {divergence.tensor}" + (f" on {rank}" if rank else "")


def value(shown: Any) -> str:
    """An expected or found value with all its digits: the difference may be in the last one."""
    return ", ".join(map(str, shown)) if isinstance(shown, list | tuple) else str(shown)


def notes(results: CompareResults) -> list[str]:
    """What the table has no room for, one sentence each."""
    return [*conditions(results), *problems(results), *row_notes(results), *one_process(results)]


def conditions(results: CompareResults) -> list[str]:
    """What all rows have in common: the batch, threads, loader workers, dtypes, and how it was measured."""
    proof = results.proof
    sentences = [
        f"One step sees {shares(results.global_batch, results.world_size)}, on every engine.",
        f"Threads per rank: {results.threads_per_rank}. Loader workers per rank: {results.workers}"
        + (" (a rank loads its own data)." if results.workers == 0 else "."),
        f"Proven in {proof.dtype} over {proof.steps} steps{fewer_rows(results)} against the reference, which computes "
        "all ranks' work in one process"
        + (f"; float64 failed: {proof.float64_failed}." if proof.float64_failed else "."),
    ]
    if any(row.continued_by for row in results.engines):
        sentences.append(
            "Each training was interrupted by a checkpoint, and continued by a second launch; the reference was not."
        )
    if results.measured:
        sentences += [
            f"Measured in {results.dtype}. Launches of every engine: {results.repeats}, in turn with the others; "
            f"each leaves out its first {results.warmup_steps} steps and times the next {results.measured_steps}.",
            INTERVAL,
            "× one process is paired: launches of the same round. Scaling efficiency is that, divided by the replicas.",
            "Step times are medians over all measured steps, by rank 0's clock; "
            "the wait for its data is part of a step.",
            "Peak memory is that of the rank that needs most; start-up ends at the first batch.",
        ]
    return sentences


def fewer_rows(results: CompareResults) -> str:
    """' of 32 samples …', where a step of the proof takes fewer than the job's."""
    rows = results.proof.rows
    return f" of {rows} samples (the whole batch would take long)" if 0 < rows < results.global_batch else ""


def problems(results: CompareResults) -> list[str]:
    """What is wrong with each engine that ran: why it failed or refuses, or what differs first."""
    sentences = []
    for row in results.engines:
        name = label(row)
        if row.reason and row.verdict != "unavailable":
            sentences.append(f"{name}: {row.verdict}: {row.reason}")
        divergence = row.first_divergence
        if divergence:
            values = f"expected {value(divergence.expected)}, found {value(divergence.found)}"
            sentences.append(f"{name}: {verdict_text(row)}: {values}")
            if divergence.cause:
                sentences.append(f"{name}: the usual cause: {divergence.cause}")
    return [sentence(text) for text in sentences]


def row_notes(results: CompareResults) -> list[str]:
    """What else there is to say about each row."""
    sentences = []
    for row in results.engines:
        name = label(row)
        if row.verdict == "unavailable":
            sentences.append(f"{name}: {row.verdict}: {row.reason}")
        if row.numerics:
            sentences.append(f"{name}: {numerics(row.numerics)}")
        sentences += [f"{name}: {note}" for note in row.notes]
    return [sentence(text) for text in sentences]


def numerics(inexactness: Inexactness) -> str:
    """How far an inexact engine's training is from the exact one."""
    skipped = inexactness.skipped_steps
    allowed = f" (its rounding allows {difference(inexactness.bound)})" if inexactness.bound is not None else ""
    loss_gap = MISSING if inexactness.loss_gap is None else format(inexactness.loss_gap, ".2%")
    return (
        "with its inexact part off it takes the same steps; with it on, in float32, its final weights are "
        f"{difference(inexactness.distance)} from those of exact training{allowed}, and its last loss is {loss_gap} off"
        + (f"; {skipped} {'step was' if skipped == 1 else 'steps were'} skipped after an overflow" if skipped else "")
    )


def one_process(results: CompareResults) -> list[str]:
    """Whether the ranks together train what one process alone would. Empty where that was not compared."""
    compared = results.same_as_one_process
    if compared is None:
        return []
    ranks, whole = results.world_size, "what one process computes on the whole batch"
    if compared.same:
        return [f"{ranks} ranks compute {whole}."]
    kind = "as expected" if compared.answer == "no, as expected" else "which is a mistake in the job"
    texts = [f"For this job {ranks} ranks do not compute {whole}, {kind}: {compared.reason}"]
    return [sentence(text) for text in [*texts, *([f"What helps: {compared.advice}"] if compared.advice else [])]]


def sentence(text: str) -> str:
    """`text` with a full stop, unless it ends a sentence already."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


def shares(rows: int, ranks: int) -> str:
    """'2 ranks x 32 = 64 samples'. The low ranks get the remainder: '1 rank x 22 + 2 ranks x 21 = 64 samples'."""
    each, more = divmod(rows, ranks)
    if more == 0:
        return f"{_ranks(ranks)} x {each} = {rows} samples"
    return f"{_ranks(more)} x {each + 1} + {_ranks(ranks - more)} x {each} = {rows} samples (uneven)"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
