"""The judge reads all of a run's life that it claims to: each number and file that a fault would change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance import jobs_job
from messages import ids
from proof.test_judge import Tampered, changed
from ranks import Ranks, engine_facts, proof_plan, reference_plan
from samestep.proof.judge import judge
from samestep.proof.trace import Expectation
from samestep.records.record import Record
from samestep.records.reference_record import ReferenceTrainingRecord
from samestep.records.results import Divergence
from samestep.records.training_record import TrainingRecord

Tamper = Callable[[Record], Record]


def lived(ranks: Ranks, reference_rank: Ranks, job: str, settings: dict[str, str]) -> tuple[Expectation, Record]:
    plan = reference_plan(job, 2, settings, also="life")
    layouts = tuple(replace(layout, trainings=("gradient", "sgd", "life")) for layout in plan.layouts)
    expectation = Expectation(reference_rank.work(replace(plan, layouts=layouts)), 0)
    return expectation, ranks.work(proof_plan(expectation, job, "ddp", 2, settings, engine_facts("ddp", 2)))


@pytest.fixture(scope="module")
def healthy(ranks: Callable[[int], Ranks], reference_rank: Ranks) -> tuple[Expectation, Record]:
    return lived(ranks(2), reference_rank, "jobs:averaged", {})


def _run(change: Callable[[TrainingRecord], TrainingRecord], rank: int = 1) -> Tamper:
    return lambda record: changed(record, change, "life", rank)


def _restart(**new: int) -> Tamper:
    def change(run: TrainingRecord) -> TrainingRecord:
        assert run.restart
        return replace(run, restart=replace(run.restart, **new))

    return _run(change, rank=0)


def _loss(step: int, change: Callable[[float], float] = lambda loss: loss + 1e-9) -> Tamper:
    def changed_losses(run: TrainingRecord) -> TrainingRecord:
        losses = [change(loss) if at == step else loss for at, loss in zip(run.step_of, run.losses)]
        return replace(run, losses=losses)

    return _run(changed_losses)


def _curve(change: Callable[[list[dict[str, float]]], list[dict[str, float]]]) -> Tamper:
    return _run(lambda run: replace(run, curve=change(run.curve)))


def _entry(number: int, **new: float) -> Tamper:
    return _curve(lambda curve: [*curve[:number], {**curve[number], **new}, *curve[number + 1 :]])


def _stale(record: Record) -> Record:
    curve = record.training("life")[1].curve
    return _entry(2, **{name: value for name, value in curve[1].items() if name != "step"})(record)


def _file(kind: str, name: str, change: Callable[[Any], Any]) -> Tamper:
    key = f"life{kind}"
    return lambda record: Tampered(record.folder, record.ranks, {key: {name: change(record.arrays(key)[name])}})


def _other_buffers(record: Record) -> Record:
    return Tampered(record.folder, record.ranks, {"life.buffers1": record.arrays("life.buffers0")})


def _last_saved(record: Record) -> Record:
    last = record.arrays("life") | record.arrays("life.buffers0")
    return Tampered(record.folder, record.ranks, {"life.saved": last})


TAMPERINGS: dict[str, tuple[Tamper, str, str]] = {
    "stopped a step later": (_restart(stopped_at=6), "optimizer steps", "run_stopped_at_another_step"),
    "began anew": (_restart(continued_at=0), "resumed step", "training_began_anew"),
    "continued elsewhere": (_restart(continued_at=4), "resumed step", "run_continued_at_another_step"),
    "a step fewer": (_restart(done=7), "optimizer steps", "run_ended_at_another_step"),
    "an older checkpoint": (_restart(saved_at=5), "optimizer steps", "checkpoint_of_another_step"),
    "the first loss": (_loss(0), "loss", "first_loss_of_run_differs"),
    "the second loss": (_loss(1), "loss", "wrong_where_nothing_observes"),
    "the loss after an evaluation": (_loss(2), "loss", "wrong_since_evaluation"),
    "the loss after a checkpoint": (_loss(4), "loss", "wrong_since_checkpoint"),
    "the loss after the restart": (_loss(5), "loss", "wrong_since_restart"),
    "a loss that is no number": (_loss(6, lambda _: float("nan")), "loss", "state_lost_at_restart"),
    "an evaluation": (_entry(1, loss=1.0), "evaluation", "evaluation_of_other_weights"),
    "an evaluation after the restart": (_entry(2, loss=1.0), "evaluation", "state_lost_at_restart"),
    "a metric": (_entry(1, accuracy=2.0), "evaluation", "evaluation_of_other_weights"),
    "an evaluation of the weights before": (_stale, "evaluation", "evaluation_of_earlier_weights"),
    "an evaluation fewer": (_curve(lambda curve: curve[:-1]), "evaluation", "evaluation_left_out"),
    "an evaluation more": (
        _curve(lambda curve: [{**curve[0], "step": 1}, *curve]),
        "evaluation",
        "evaluation_at_another_step",
    ),
    "another best": (_run(lambda run: replace(run, best_at=0)), "best evaluation", "another_evaluation_is_best"),
    "a weight": (_file(".raw", "0.weight", lambda w: w + 1e-9), "parameter", "last_update_wrong"),
    "an average": (_file("", "0.weight", lambda w: w + 1e-9), "averaged weights", "average_wrong"),
    "a buffer": (
        _file(".buffers1", "1.running_var", lambda b: b * 1.001),
        "buffer",
        "buffers_synchronised_in_another_way",
    ),
    "rank 0's buffers on rank 1": (_other_buffers, "buffer", "buffers_of_another_rank"),
    "a saved weight": (
        _file(".saved", "0.weight", lambda w: w + 1e-9),
        "saved weights",
        "saved_weights_of_no_evaluation",
    ),
    "the last weights saved": (_last_saved, "saved weights", "saved_weights_of_another_evaluation"),
    "predictions in reverse": (
        _file(".outputs", "outputs", lambda p: p[::-1]),
        "predictions",
        "predictions_in_another_order",
    ),
    "another prediction": (_file(".outputs", "outputs", lambda p: p + 1e-6), "predictions", "predictions_differ"),
    "fewer predictions": (_file(".outputs", "outputs", lambda p: p[1:]), "predictions", "predictions_differ"),
}


def test_a_healthy_run_is_the_reference_s(healthy: tuple[Expectation, Record]) -> None:
    expectation, record = healthy
    verdict = judge(expectation, record)
    assert (verdict.verdict, verdict.first_divergence) == ("same", None)
    assert not verdict.notes
    life = expectation.of("life").life
    assert life and life.options.predictions
    assert 0 < life.best_at < len(life.evaluations) - 1  # a file of the first or the last evaluation's weights shows


@pytest.mark.parametrize("name", TAMPERINGS)
def test_what_a_fault_would_change_is_read(name: str, healthy: tuple[Expectation, Record]) -> None:
    tamper, quantity, cause = TAMPERINGS[name]
    first = judge(healthy[0], tamper(healthy[1])).first_divergence
    assert isinstance(first, Divergence), name
    assert (first.training, first.quantity) == ("life", quantity)
    assert cause in ids(first.cause), first.cause


def test_a_file_of_the_trained_part_alone_predicts_with_what_the_job_builds(
    ranks: Callable[[int], Ranks], reference_rank: Ranks
) -> None:
    """And a buffer that is not persistent, which is in checkpoints alone, is compared on each rank."""
    job = f"{Path(jobs_job.__file__)}:averaged"
    expectation, record = lived(ranks(2), reference_rank, job, {"save": "trainable"})
    life = expectation.of("life").life
    assert life and life.options.predictions
    verdict = judge(expectation, record)
    assert (verdict.verdict, verdict.first_divergence) == ("same", None)
    for rank in (0, 1):
        lost = _file(f".buffers{rank}", "mean", lambda mean: 0 * mean)
        first = judge(expectation, lost(record)).first_divergence
        assert first and (first.quantity, first.tensor, first.rank) == ("buffer", "mean", rank)


def test_a_best_evaluation_that_rounding_decides_is_not_compared(healthy: tuple[Expectation, Record]) -> None:
    expectation, record = healthy
    trainings, (rank,) = expectation.facts.trainings, expectation.record.ranks
    noisy = [_with_noise(run) if number else run for number, run in enumerate(trainings["life"])]
    facts = replace(expectation.facts, trainings={**trainings, "life": noisy})
    reference = Tampered(expectation.record.folder, [replace(rank, layouts=[facts])], {})
    verdict = judge(Expectation(reference, 0), _run(lambda run: replace(run, best_at=0))(record))
    assert verdict.verdict == "same"
    assert "best_evaluation_not_compared" in {note.id for note in verdict.notes}


def _with_noise(run: ReferenceTrainingRecord) -> ReferenceTrainingRecord:
    """A run whose evaluations rounding has moved by their own size."""
    assert run.life
    moved = [replace(e, sums={name: 2 * total for name, total in e.sums.items()}) for e in run.life.evaluations]
    return replace(run, life=replace(run.life, evaluations=moved))
