"""The judge reads every quantity that it claims to, and each verdict means what it says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command import DRAWN
from mutations.faults import DDP
from mutations.plant import patched
from planting import Edit, FileFault, plant_in_files
from ranks import Ranks, engine_facts, proof_plan, prove, reference_plan
from samestep.bounds import MORE_DRAWS, TIMES_NOISE
from samestep.proof.causes import Case
from samestep.proof.judge import judge, judge_by_draws
from samestep.proof.trace import Expectation, of_engine
from samestep.records.plan import ReferencePlan
from samestep.records.record import RankRecord, Record
from samestep.records.results import Divergence
from samestep.records.training_record import EvaluationRecord, MicroBatchRecord, TrainingRecord

OF_RANKS = Path(__file__).parents[1] / "jobs" / "of_ranks.py"


@dataclass(frozen=True)
class Tampered(Record):
    """A record of which a test has changed observations or tensors. tensors: training -> name -> the changed one."""

    changed_ranks: list[RankRecord]
    tensors: dict[str, dict[str, Any]]

    @property
    def ranks(self) -> list[RankRecord]:  # type: ignore[override]
        return self.changed_ranks

    def arrays(self, name: str, rank: int = 0) -> dict[str, Any]:
        return super().arrays(name, rank) | self.tensors.get(name, {})


Change = Callable[[TrainingRecord], TrainingRecord]
Tamper = Callable[[Record], Record]


def changed(record: Record, change: Change, training: str = "sgd", rank: int = 1) -> Tampered:
    """`record` with one rank's observations of a training changed."""
    ranks = list(record.ranks)
    trainings = {**ranks[rank].trainings, training: change(ranks[rank].trainings[training])}
    ranks[rank] = replace(ranks[rank], trainings=trainings)
    return Tampered(record.folder, ranks, {})


@pytest.fixture(scope="module")
def healthy(ranks: Callable[[int], Ranks], reference_rank: Ranks) -> tuple[Expectation, Record]:
    reference = reference_rank.work(reference_plan("jobs:conv", 2))
    expectation = Expectation(reference, 0)
    return expectation, ranks(2).work(proof_plan(expectation, "jobs:conv", "ddp", 2))


def _seen(change: Change) -> Tamper:
    return lambda record: changed(record, change)


def _fields(**new: Any) -> Tamper:
    return _seen(lambda seen: replace(seen, **new))


def _at(values: list[Any], index: int, value: Any) -> list[Any]:
    return [*values[:index], value, *values[index + 1 :]]


def _loss(change: Callable[[float], float]) -> Tamper:
    return _seen(lambda seen: replace(seen, losses=_at(seen.losses, 6, change(seen.losses[6]))))


def _part(step: int, change: Callable[[MicroBatchRecord], MicroBatchRecord]) -> Tamper:
    return _seen(
        lambda seen: replace(seen, micro_batches=_at(seen.micro_batches, step, change(seen.micro_batches[step])))
    )


def _rates(change: Callable[[list[list[float]]], list[list[float]]]) -> Tamper:
    return _seen(lambda seen: replace(seen, rates=change(seen.rates)))


def _evaluation(change: Callable[[EvaluationRecord], EvaluationRecord]) -> Tamper:
    def change_seen(seen: TrainingRecord) -> TrainingRecord:
        assert seen.evaluation is not None
        return replace(seen, evaluation=change(seen.evaluation))

    return _seen(change_seen)


def _tensor(name: str, change: Callable[[Any], Any], training: str = "sgd") -> Tamper:
    return lambda record: Tampered(
        record.folder, record.ranks, {training: {name: change(record.arrays(training)[name])}}
    )


def _another_name(record: Record) -> Record:
    return Tampered(record.folder, record.ranks, {"sgd": {"module.5.weight": np.zeros(1)}})


TAMPERINGS: dict[str, tuple[Tamper, str, int | None]] = {
    "first weights": (_fields(start_digests=["0"]), "initial weights", None),
    "autocast": (_fields(autocast=True), "precision", None),
    "a row left out": (_part(3, lambda p: replace(p, indices=p.indices[1:])), "rows", 3),
    "rows exchanged": (_part(3, lambda p: replace(p, indices=p.indices[::-1])), "indices", 3),
    "a tensor": (_part(2, lambda p: replace(p, digests=_at(p.digests, 0, "0"))), "tensors received", 2),
    "a weight in the mean": (_part(2, lambda p: replace(p, weight=4.0)), "weight", 2),
    "a loss": (_loss(lambda loss: loss + 1e-9), "loss", 6),
    "a loss that is no number": (_loss(lambda _: math.nan), "loss", 6),
    "a learning rate": (_rates(lambda rates: _at(rates, 5, [0.0123])), "learning rate", 5),
    "a step too many": (_rates(lambda rates: [*rates, [0.01]]), "optimizer steps", None),
    "a step too few": (_rates(lambda rates: rates[:-1]), "optimizer steps", 7),
    "another group": (_rates(lambda rates: _at(rates, 0, [0.05, 0.05])), "parameter groups", 0),
    "the first gradient": (_tensor("5.weight", lambda w: w + 1e-9, "gradient"), "first gradient", 0),
    "a parameter": (_tensor("5.weight", lambda w: w + 1e-9), "parameter", 7),
    "the first parameter": (_tensor("0.weight", lambda w: w + 1e-6), "parameter", 7),
    "the first parameter's gradient": (_tensor("0.weight", lambda w: w + 1e-6, "gradient"), "first gradient", 0),
    "another buffer": (_tensor("1.running_var", lambda b: b * (1 + 1e-6)), "buffer", 7),
    "a parameter under the job's optimizer": (_tensor("5.weight", lambda w: w + 1e-9, "user"), "parameter", 7),
    "a parameter that is no number": (_tensor("5.weight", lambda w: w * np.nan), "parameter", 7),
    "a parameter of another shape": (_tensor("5.weight", lambda w: w[:1]), "parameter", 7),
    "a buffer": (_tensor("1.running_mean", lambda b: b + 1e-9), "buffer", 7),
    "a count": (_tensor("1.num_batches_tracked", lambda b: b + 1), "buffer", 7),
    "a name": (_another_name, "names of the weights", None),
    "a later epoch's rows": (_seen(lambda s: replace(s, later={**s.later, 97: s.later[97][::-1]})), "indices", None),
    "evaluated rows": (_evaluation(lambda e: replace(e, rows=18)), "evaluation rows", None),
    "an evaluated row twice": (_evaluation(lambda e: replace(e, indices=[*e.indices, 0])), "evaluation rows", None),
    "evaluated rows' weight": (_evaluation(lambda e: replace(e, weight=18.0)), "evaluation rows", None),
    "a metric": (_evaluation(lambda e: replace(e, sums={**e.sums, "accuracy": 99.0})), "evaluation", None),
    "a metric's mean": (_evaluation(lambda e: replace(e, means={**e.means, "accuracy": 0.5})), "evaluation", None),
}


# Quantity -> the ids of the causes that may be named where only one number is tampered with.
CAUSES_OF = {
    "initial weights": {"ranks_start_from_different_weights"},
    "precision": {"autocast_not_declared"},
    "rows": {"batch_has_another_size"},
    "indices": {"rows_shared_out_in_another_way", "later_epoch_has_other_rows"},
    "tensors received": {"values_of_right_rows_differ"},
    "weight": {"weights_of_right_rows_differ"},
    "loss": {"update_wrong_at_one_step"},
    "learning rate": {"scheduler_steps_at_other_times"},
    "optimizer steps": {"optimizer_steps_left_out", "optimizer_steps_repeated"},
    "parameter groups": {"parameter_groups_missing"},
    "first gradient": {
        "gradients_of_some_tensors_wrong",
        "gradients_rounded_on_their_way",
    },
    "parameter": {"last_update_wrong", "own_optimizer_differs"},
    "buffer": {"buffers_synchronised_in_another_way", "batches_counted_repeatedly"},
    "names of the weights": {"names_of_weights_differ"},
    "evaluation rows": {"evaluation_padded", "evaluation_of_a_part_of_the_rows", "evaluation_weights_differ"},
    "evaluation": {"evaluation_value_differs"},
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_every_quantity_is_read(name: str, healthy: tuple[Expectation, Record]) -> None:
    expectation, record = healthy
    tamper, quantity, step = TAMPERINGS[name]
    assert judge(expectation, changed(record, lambda seen: seen)).verdict == "same"
    verdict = judge(expectation, tamper(record))
    assert verdict.verdict == "differs"
    assert verdict.first_divergence is not None
    assert (verdict.first_divergence.quantity, verdict.first_divergence.step) == (quantity, step)
    assert verdict.first_divergence.cause and verdict.first_divergence.cause.id in CAUSES_OF[quantity]
    json.dumps(asdict(verdict), allow_nan=False)
    assert not verdict.bitwise


@pytest.mark.parametrize(
    ("times", "draws_too_small", "verdict", "plays"),
    [(3, True, "same", 1), (3, False, "differs", 1), (30, False, "differs", 0)],
)
def test_a_difference_near_its_bound_is_judged_by_more_draws(
    times: float, draws_too_small: bool, verdict: str, plays: int, healthy: tuple[Expectation, Record]
) -> None:
    """Two draws that are by chance a tenth of what rounding does are no reason to say that a training differs."""
    expectation, record = healthy
    name, played = "5.weight", list[ReferencePlan]()
    bound = expectation.noise_distances("sgd")[name] * TIMES_NOISE

    def with_draws(times: float) -> Record:
        """The reference whose draws move the tensor so many times as far."""
        rank = expectation.record.ranks[0]
        layout = rank.layouts[0]
        drawn = [
            replace(run, distances={**run.distances, name: run.distances[name] * times}) if run.distances else run
            for run in layout.trainings["sgd"]
        ]
        layout = replace(layout, trainings={**layout.trainings, "sgd": drawn})
        return Tampered(expectation.record.folder, [replace(rank, layouts=[layout])], {})

    wide = with_draws(1e6)
    off = np.array(record.arrays("sgd")[name])
    off.reshape(-1)[0] += times * 1e6 * bound
    differing = Tampered(record.folder, record.ranks, {"sgd": {name: off}})

    def play(plan: ReferencePlan) -> Record:
        played.append(plan)
        return with_draws(1e7) if draws_too_small else wide

    found = judge_by_draws(wide, lambda draws: judge(Expectation(draws, 0), differing), play)
    assert found.verdict == verdict, found
    assert [plan.noise_runs for plan in played] == [MORE_DRAWS] * plays


def _of_both_ranks(record: Record, change: Callable[[int, TrainingRecord], TrainingRecord]) -> Record:
    for rank in range(2):
        record = changed(record, lambda seen, rank=rank: change(rank, seen), rank=rank)  # type: ignore[misc]
    return record


@pytest.mark.parametrize(
    ("begins_like_the_first", "cause"),
    [(True, "order_does_not_change_with_epoch"), (False, "rows_shared_out_in_another_way")],
)
def test_an_order_is_that_of_another_epoch_only_where_its_rows_are(
    begins_like_the_first: bool, cause: str, healthy: tuple[Expectation, Record]
) -> None:
    expectation, record = healthy
    epochs = [part.epoch for part in record.training("sgd")[0].micro_batches]
    begins = epochs.index(1)

    def change(rank: int, seen: TrainingRecord) -> TrainingRecord:
        first = seen.micro_batches[0 if begins_like_the_first else begins].indices
        indices = first if begins_like_the_first else first[::-1]
        part = replace(seen.micro_batches[begins], indices=indices)
        return replace(seen, micro_batches=_at(seen.micro_batches, begins, part))

    found = judge(expectation, _of_both_ranks(record, change)).first_divergence
    assert found and found.quantity == "indices" and found.cause and found.cause.id == cause


def test_values_at_an_epochs_first_step_are_no_augmentation_of_another_unless_they_are_its(
    healthy: tuple[Expectation, Record],
) -> None:
    expectation, record = healthy
    begins = [part.epoch for part in record.training("sgd")[0].micro_batches].index(1)
    tampered = _part(begins, lambda part: replace(part, digests=_at(part.digests, 0, "0")))(record)
    found = judge(expectation, tampered).first_divergence
    assert found and found.cause and found.cause.id == "values_of_right_rows_differ"
    assert found.cause.fields["count"] == 1


@pytest.mark.parametrize(
    ("share", "cause"), [(1e-4, "gradients_rounded_on_their_way"), (0.05, "gradients_off_by_a_share")]
)
def test_digits_are_the_last_ones_only_where_they_are(
    share: float, cause: str, healthy: tuple[Expectation, Record]
) -> None:
    """Where rounding to bfloat16 may hide a tensor's difference, one of 5 % is still none of the last digits."""
    expectation, record = healthy
    facts = replace(expectation.facts, rounds_to="bfloat16")
    rank = replace(expectation.record.ranks[0], layouts=[facts])
    coarse = Expectation(Tampered(expectation.record.folder, [rank], {}), 0)
    start, end = coarse.start()["5.weight"], record.arrays("gradient")["5.weight"].copy()
    largest = np.abs(start.reshape(end.shape) - end).max()
    end.reshape(-1)[0] += share * largest
    tampered = Tampered(record.folder, record.ranks, {"gradient": {"5.weight": end}})
    case = Case(coarse, "gradient", coarse.trace("gradient", 0, 2), of_engine(tampered, "gradient"))
    assert case.divergence("first gradient", 0.0, 1.0, tensor="5.weight").cause.id == cause


def test_last_bits_cost_bitwise_but_not_same(healthy: tuple[Expectation, Record]) -> None:
    expectation, record = healthy
    verdict = judge(expectation, _tensor("5.weight", lambda w: np.nextafter(w, np.inf))(record))
    assert (verdict.verdict, verdict.bitwise) == ("same", False)
    assert verdict.max_difference is not None
    assert verdict.bound is not None
    assert 0 < verdict.max_difference < verdict.bound


@pytest.mark.parametrize(("scale", "expected"), [("1.0", "approximate"), ("2.0", "differs")])
def test_a_lossy_engine_is_approximate_within_its_rounding(
    scale: str, expected: str, reference_rank: Ranks, tmp_path: Path
) -> None:
    """A gradient that only the compressed path doubles: the loop is right, its numerics are not."""
    hook = "            model.register_comm_hook(None, getattr(default_hooks, compress"
    doubled = f"            scale = {scale}\n{hook}"
    source = patched(FileFault("lossy", DDP, hook, doubled), tmp_path)
    undoubled = Edit("        if compress == ", "        scale = 1.0\n        if compress == ")
    scaled = Edit("loss.backward()", "(loss * scale).backward()")
    plant_in_files(source / "samestep", [undoubled, scaled], DDP)
    with Ranks(2, source) as ranks:
        verdict = prove(reference_rank, ranks, "jobs:tied", "ddp", engine_settings={"compress": "fp16"})
    assert verdict.verdict == expected, verdict
    assert verdict.numerics is not None
    assert verdict.numerics.distance is not None
    assert verdict.numerics.distance > 0
    assert (verdict.first_divergence is None) == (expected == "approximate")


def test_numerics_that_skip_every_step_prove_nothing(ranks: Callable[[int], Ranks], reference_rank: Ranks) -> None:
    facts = engine_facts("amp", 2, {"precision": "fp16"})
    reference = reference_rank.work(reference_plan("jobs:conv", 2, None, facts))
    loop, numerics = Expectation(reference, 0), Expectation(reference, 1)
    record = ranks(2).work(proof_plan(loop, "jobs:conv", "amp", 2, None, facts))
    assert judge(loop, record, numerics).verdict == "approximate"
    for rank in range(2):
        record = changed(record, lambda seen: replace(seen, skipped_steps=8), "numerics of sgd", rank)
    assert judge(loop, record, numerics).verdict == "refused"


def test_a_tensor_whose_bound_says_nothing_is_named(ranks: Callable[[int], Ranks], reference_rank: Ranks) -> None:
    """AdamW makes full steps of the rounding noise that is the gradient of a bias before BatchNorm."""
    chosen = {"arch": "batchnorm", "optimizer": "adamw", "float32_only": "true"}
    verdict = prove(reference_rank, ranks(2), DRAWN, "ddp", chosen)
    assert verdict.verdict == "same", verdict
    notes = {note.id: note.fields for note in verdict.notes}
    assert "0.bias" in notes["tensors_ill_conditioned"]["user"], notes
    assert notes["proven_in_another_dtype"]["dtype"] == "float32"


def test_buffers_of_booleans_infinities_and_no_numbers_are_no_difference(
    ranks: Callable[[int], Ranks], reference_rank: Ranks
) -> None:
    verdict = prove(reference_rank, ranks(2), DRAWN, "ddp", {"arch": "masked"})
    assert (verdict.verdict, verdict.bitwise) == ("same", True), verdict


def test_clipping_that_never_acts_is_said(ranks: Callable[[int], Ranks], reference_rank: Ranks) -> None:
    verdict = prove(reference_rank, ranks(2), DRAWN, "ddp", {"clip_norm": "1000.0"})
    assert verdict.verdict == "same"
    assert "clipping_never_acted" in [note.id for note in verdict.notes]


def test_a_parameter_of_whole_numbers_is_compared(ranks: Callable[[int], Ranks], reference_rank: Ranks) -> None:
    verdict = prove(reference_rank, ranks(2), f"{OF_RANKS}:whole_numbers", "ddp")
    assert (verdict.verdict, verdict.bitwise) == ("same", True), verdict


def test_an_optimizer_that_moves_nothing_is_said(ranks: Callable[[int], Ranks], reference_rank: Ranks) -> None:
    notes = [note.id for note in prove(reference_rank, ranks(2), f"{OF_RANKS}:still", "ddp").notes]
    assert "own_optimizer_moves_nothing" in notes
    verdict = prove(reference_rank, ranks(2), f"{OF_RANKS}:asks_in_vain", "ddp")
    assert verdict.verdict == "same" and "own_optimizer_moves_nothing" not in [note.id for note in verdict.notes]


@pytest.mark.parametrize("name", ["loss_of_size_at_top", "loss_of_rank", "loss_of_size"])
def test_a_job_that_asks_which_rank_it_is_is_told_so(
    name: str, ranks: Callable[[int], Ranks], reference_rank: Ranks
) -> None:
    """The reference is none. Without it the engine alone would be suspected."""
    divergence = prove(reference_rank, ranks(2), f"{OF_RANKS}:{name}", "ddp").first_divergence
    assert divergence and divergence.quantity == "loss" and divergence.cause
    assert divergence.cause.id == "job_asks_for_its_rank", divergence
    assert divergence.cause.fields["place"].startswith("of_ranks.py:"), divergence


def test_a_gradient_that_is_wrong_between_the_samples_is_told(healthy: tuple[Expectation, Record]) -> None:
    """Of a large tensor only samples of the start are kept: the values of the gradient are known there alone."""
    expectation, record = healthy
    files = ["start.float64", "0.gradient.own", "0.gradient.before_last", "0.gradient.own_before_last"]
    kept = expectation.record
    sampled = {file: {name: array.reshape(-1)[::7] for name, array in kept.arrays(file).items()} for file in files}
    thin = Expectation(Tampered(kept.folder, kept.ranks, sampled), 0)
    assert judge(thin, record).verdict == "same"

    def judged(element: int) -> Divergence:
        wrong = np.array(record.arrays("gradient")["5.weight"])
        wrong.reshape(-1)[element] += 1e-3
        found = judge(thin, Tampered(record.folder, record.ranks, {"gradient": {"5.weight": wrong}})).first_divergence
        assert found and (found.quantity, found.tensor) == ("first gradient", "5.weight")
        return found

    assert judged(14).expected - judged(14).found == pytest.approx(1e-3)
    assert (judged(15).expected, judged(15).found) == ("the reference's", "0.001 off, in few of its elements")
