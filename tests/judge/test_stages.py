"""The judge of a pipeline's stages, on records that are made up: each is judged by itself. It needs no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from judge.test_script import NAMES, STEPS, finding_of, judged
from samestep.judge import judge
from samestep.judge.layout import Layout
from samestep.message import message
from samestep.records.files import read, write
from samestep.records.findings import CheckResults
from samestep.records.record import Record
from samestep.records.script import PassRecord, ScriptRecord
from samestep.records.script_plan import ScriptPlan
from samestep.records.tensor_files import read_arrays, write_arrays


def pipeline(
    folder: Path,
    scale: float = 1.0,
    micro_batches: int = 1,
    weight: float | None = None,
    reads_other_rows: bool = False,
) -> CheckResults:
    """Judges two ranks that hold other parameters and read the same rows. scale: of the gradient of rank 1."""
    judged(folder, "never reduced", micro_batches, weight)
    path = folder / "rank1.json"
    record = read(ScriptRecord, path)
    names = {name: f"stage 1: {name}" for name in NAMES}
    steps = [
        replace(
            step,
            weights={names[name]: value for name, value in step.weights.items()},
            moved=[*names.values()],
            micro_batches=[replace(micro_batch, losses=[], rows=[]) for micro_batch in step.micro_batches],
        )
        for step in record.steps
    ]
    passes: list[PassRecord] = read(ScriptRecord, folder / "rank0.json").passes
    if reads_other_rows:
        content = [["another row"] for _ in passes[0].digests]
        passes = [replace(passes[0], batches=passes[0].batches[::-1], digests=content), *passes[1:]]
    write(path, replace(record, start={new: 1 for new in names.values()}, steps=steps, passes=passes))
    for step in range(STEPS):
        arrays = read_arrays(folder, 1, f"step{step}").items()
        scaled = {key: value * (scale if key.startswith("taken") else 1.0) for key, value in arrays}
        prefixed = {f"{kind}stage 1: {name}": value for key, value in scaled.items() for kind, name in [_split(key)]}
        write_arrays(folder / f"rank1.step{step}.npz", prefixed)
    ranks = [read(ScriptRecord, folder / f"rank{rank}.json") for rank in range(2)]
    assert [[rank.rank for rank in part] for part in Layout.of(ranks).stages] == [[0], [1]]
    return judge(ScriptPlan(str(folder), 0.0, "train.py", (), STEPS), ranks, Record(folder))


def _split(key: str) -> tuple[str, str]:
    head, _, name = key.rpartition(" ")
    return f"{head} ", name


def test_stages_are_no_replicas_and_may_read_the_same_rows(tmp_path: Path) -> None:
    results = pipeline(tmp_path)
    assert results.answer == "right", results.findings
    gradient, weight = (finding_of(results, question).message for question in ("gradient", "loss weight"))
    assert (gradient.id, gradient.fields["stages"]) == ("each_stage_answers", 2)
    assert (weight.id, weight.fields["stage"]) == ("stage_answers", 0)
    assert weight.fields["answer"].id == "losses_weigh_one_together"


def test_stages_at_both_ends_that_read_other_rows_are_not_right(tmp_path: Path) -> None:
    results = pipeline(tmp_path, reads_other_rows=True)
    rows = finding_of(results, "rows")
    assert (results.answer, rows.answer) == ("unknown", "unknown"), results.findings
    assert rows.message == message("stages_may_read_other_rows", ranks=[0, 1])


def test_losses_that_are_not_divided_by_the_micro_batches(tmp_path: Path) -> None:
    first = pipeline(tmp_path, micro_batches=3, weight=1.0).first_divergence
    assert first and first.cause == message("loss_not_divided_by_accumulation", micro_batches=3), first


def test_stages_that_scale_their_gradients_otherwise(tmp_path: Path) -> None:
    first = pipeline(tmp_path, scale=0.25).first_divergence
    assert first and first.rank == 1 and first.found == 0.25
    assert first.cause == message("stages_scale_gradients_apart", factor=0.25, stage=1, first=1.0)
