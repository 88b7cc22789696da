"""What the results say, in sentences: the words that the terminal, the figures and the page share."""

from __future__ import annotations

from typing import Any

from samestep.report.numbers import difference

Results = dict[str, Any]
Row = dict[str, Any]

PROVEN = ("same", "approximate")  # only these take the step that is timed: others have no place in a race
TRAININGS = {
    "gradient": "one step of plain SGD",
    "sgd": "SGD with momentum",
    "user": "the job's own optimizer",
}
INTERVAL = (
    "A figure is the median over launches, with its 95 % bootstrap interval; "
    "n counts launches, never steps, because the steps of one launch share its luck."
)


def measured(results: Results) -> bool:
    """Whether these are results of a measurement, and not of a proof alone."""
    return any("samples_per_second" in row for row in results["engines"])


def racing(results: Results) -> list[Row]:
    """The rows whose speed may be compared: proven, and measured."""
    return [row for row in results["engines"] if row["verdict"] in PROVEN and row.get("samples_per_second")]


def title(row: Row) -> str:
    """'ddp compress=fp16': the engine and the settings that it was given."""
    return " ".join([row["engine"], *(f"{key}={value}" for key, value in (row.get("settings") or {}).items())])


def label(row: Row) -> str:
    """'ddp (torchrun)'"""
    return f"{title(row)} ({row['launcher']})" if row["launcher"] else title(row)


def verdict_text(row: Row) -> str:
    """'same step (bitwise)', 'approximate', 'differs at step 3: loss of rank 1', 'failed', 'refused', 'unavailable'."""
    if row["verdict"] == "same":
        return "same step (bitwise)" if row["bitwise"] else "same step"
    divergence = row["first_divergence"]
    if row["verdict"] != "differs" or divergence is None:
        return str(row["verdict"])
    at = "" if divergence["step"] is None else f" at step {divergence['step']}"
    return f"differs{at}: {where(divergence)}"


def where(divergence: dict[str, Any]) -> str:
    """The first thing that differed: 'loss of rank 1', 'first gradient of conv1.weight'."""
    rank = "" if divergence["rank"] is None else f"rank {divergence['rank']}"
    if divergence["tensor"] is None:
        return f"{divergence['quantity']} of {rank}" if rank else str(divergence["quantity"])
    return f"{divergence['quantity']} of {divergence['tensor']}" + (f" on {rank}" if rank else "")


def value(shown: Any) -> str:
    """An expected or found value in full: what differs in the last digit must be seen to differ."""
    return ", ".join(map(str, shown)) if isinstance(shown, list) else str(shown)


def notes(results: Results) -> list[str]:
    """What the table cannot say, one sentence each."""
    return [*conditions(results), *row_notes(results), *one_process(results)]


def conditions(results: Results) -> list[str]:
    """What every row has in common: the batch, threads, workers, types, and how it was measured."""
    proof = results["proof"]
    said = [
        f"One step sees {_shares(results['global_batch'], results['world_size'])}, on every engine.",
        f"Threads per rank: {results['threads_per_rank']}. Loader workers per rank: {results['workers']}"
        + (" (a rank loads its own data)." if results["workers"] == 0 else "."),
        f"Proven in {proof['dtype']} over {proof['steps']} steps against the reference, which computes alone what the "
        "ranks must compute together"
        + (f"; float64 failed: {proof['float64_failed']}." if proof["float64_failed"] else "."),
    ]
    if measured(results):
        said += [
            f"Measured in {results['dtype']}. Launches of every engine: {results['repeats']}, in turn with the others; "
            f"each leaves out its first {results['warmup_steps']} steps and times the next "
            f"{results['measured_steps']}.",
            INTERVAL,
            "× one process is paired: launches of the same round. Scaling efficiency is that, divided by the replicas.",
            "Step times are medians over all measured steps, by rank 0's clock; "
            "the wait for its data is part of a step.",
            "Peak memory is that of the rank that needs most; start-up ends at the first batch.",
        ]
    return said


def row_notes(results: Results) -> list[str]:
    """Each row's reason, first divergence and remarks."""
    said = []
    for row in results["engines"]:
        name = label(row)
        if row["reason"]:
            said.append(sentence(f"{name}: {row['verdict']}: {row['reason']}"))
        if row["first_divergence"]:
            at = row["first_divergence"]
            values = f"expected {value(at['expected'])}, found {value(at['found'])}"
            said.append(sentence(f"{name}: {verdict_text(row)}: {values}"))
            if at["cause"]:
                said.append(sentence(f"{name}: the usual cause: {at['cause']}"))
        if row.get("numerics"):
            said.append(sentence(f"{name}: {numerics(row['numerics'])}"))
        said += [sentence(f"{name}: {note}") for note in row["notes"]]
    return said


def numerics(figures: dict[str, Any]) -> str:
    """How far an inexact engine's training is from the exact one."""
    skipped = figures["skipped_steps"]
    allowed = f" (its rounding allows {difference(figures['bound'])})" if figures["bound"] is not None else ""
    return (
        "its loop is the same with the inexact part off; with it on, in float32, the weights end "
        f"{difference(figures['distance'])} from the exact ones{allowed}, and the last loss "
        f"{'–' if figures['loss_gap'] is None else format(figures['loss_gap'], '.2%')} off"
        + (f"; {skipped} {'step was' if skipped == 1 else 'steps were'} skipped after an overflow" if skipped else "")
    )


def one_process(results: Results) -> list[str]:
    """Whether the ranks together train what one process alone would. Empty where nobody asked."""
    asked = results["same_as_one_process"]
    if asked is None:
        return []
    ranks, whole = results["world_size"], "what one process computes on the whole batch"
    if asked["same"]:
        return [f"{ranks} ranks compute {whole}."]
    return [sentence(f"For this job {ranks} ranks do not compute {whole}, whichever the engine: {asked['reason']}")]


def sentence(text: str) -> str:
    """`text` with a full stop, unless it ends a sentence already."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _shares(rows: int, ranks: int) -> str:
    """'2 ranks x 32 = 64 samples'; the remainder goes to the low ranks: '1 rank x 22 + 2 ranks x 21 = 64 samples'."""
    each, more = divmod(rows, ranks)
    if more == 0:
        return f"{_ranks(ranks)} x {each} = {rows} samples"
    return f"{_ranks(more)} x {each + 1} + {_ranks(ranks - more)} x {each} = {rows} samples (uneven)"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
