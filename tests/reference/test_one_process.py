"""Whether training on N ranks is training in one process: yes, no, as expected, or no, with the mistake's name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from inspected_job import inspected_job
from lane_marks import in_turn
from messages import explains
from ranks import Ranks, RanksFailed, engine_facts, judged, proof_plan, prove, reference_plan
from samestep.proof.one_process import AgainstOne, against_one, one_process
from samestep.proof.plan import held_layouts, plain_layout
from samestep.proof.trace import Expectation
from samestep.records.plan import LayoutPlan, ReferencePlan
from samestep.records.record import Record
from samestep.records.reference_record import FromOne, Moved, ReferenceLayoutRecord
from samestep.records.results import OneProcess
from samestep.reference import HeldRandomness
from samestep.reference.replica_state import ReplicaState

JOBS = f"{Path(__file__).parent}/separable_jobs.py"

ANSWERS = {
    "mean": ("yes", ""),
    "binary": ("yes", ""),
    "tokens_with_weights": ("yes", ""),
    "dropout": ("no, as expected", "dropout_of_each_rank"),
    "batch_norm": ("no, as expected", "batchnorm_of_each_ranks_rows"),
    "batch_norm_and_dropout": ("no, as expected", "several batchnorm_of_each_ranks_rows forward_draws_on_each_rank"),
    "recurrent_dropout": ("no, as expected", "forward_draws_on_each_rank"),
    "autoencoder": ("no, as expected", "forward_draws_on_each_rank"),
    "mixup": ("no, as expected", "collate_draws_for_each_rank"),
    "masked_tokens": ("no", "rows_weigh_unequally"),
    "teacher": ("yes", ""),
    "ignored_rows": ("no", "rows_that_weigh_nothing"),
    "other_ignored_rows": ("no", "rows_that_weigh_nothing"),
    "first_row_without_tokens": ("no", "rows_that_weigh_nothing"),
    "deviation_in_forward": ("no", "output_depends_on_rows_beside"),
    "gamma": ("no, as expected", "forward_draws_on_each_rank"),
    "unknown_random_numbers": ("not known", "mistake_could_hide_behind_random_numbers"),
    "rows_mixed_by_draws": ("not known", "rows_share_random_numbers"),
    "mixup_sum": ("no", "criterion_is_a_sum"),
    "masked_by_collate": ("no", "rows_weigh_unequally"),
    "running_statistics": ("no, as expected", "running_statistics_of_each_ranks_rows"),
    "batch_norm_of_evaluation": ("no, as expected", "batchnorm_of_each_ranks_rows"),
    "counts_rows": ("no", "state_kept_from_batch_to_batch"),
    "few_padded": ("no", "rows_weigh_unequally"),
    "autoencoder_sum": ("no", "criterion_is_a_sum"),
    "tokens": ("no", "rows_weigh_unequally"),
    "tokens_under_dropout": ("no", "rows_weigh_unequally"),
    "contrastive": ("no", "criterion_looks_at_other_rows"),
    "contrastive_over_all_rows": ("yes", ""),
    "other_rows_in_forward_with_all_rows": ("no", "output_depends_on_rows_beside"),
    "other_rows_in_forward": ("no", "output_depends_on_rows_beside"),
    "carried_state": ("no", "state_kept_from_batch_to_batch"),
    "carried_on": ("yes", ""),
    "carried_mean": ("no", "carried_state_mixes_rows"),
    "unused_weights": ("no", "criterion_ignores_job_weight"),
    "act_norm": ("no", "forward_writes_parameters"),
    "codebook": ("no", "forward_writes_parameters"),
    "prototypes": ("yes", ""),
    "normalised_gradients": ("no", "gradients_depend_on_rows_beside"),
    "halved_gradients": ("yes", ""),
    "clamped_gradients": ("no", "gradients_depend_on_rows_beside"),
    "clamped_far_away": ("yes", ""),
    "triplets": ("no", "criterion_looks_at_other_rows"),
    "triplets_over_all_rows": ("yes", ""),
    "observed": ("no", "output_depends_on_rows_beside"),
    "chaotic": ("not known", "rounding_hides_every_tensor"),
    "untrained": ("not known", "nothing_moves_in_proof"),
}

# Of some answers, what the reason says of the job.
FIELDS = {
    "dropout": {"layer": "1"},
    "batch_norm": {"layer": "1"},
    "ignored_rows": {"count": 2, "rows": 6},
    "other_ignored_rows": {"count": 2, "rows": 6},
    "carried_state": {"names": ["hidden"]},
    "act_norm": {"names": ["scale"]},
    "codebook": {"names": ["codes"]},
    "observed": {"names": ["furthest"]},
}


def answer(reference_rank: Ranks, name: str, replicas: int, dtype: str = "float64") -> OneProcess:
    """The answer for a job of JOBS, as verify finds it. dtype: the widest that the engine takes."""

    job = inspected_job(f"{JOBS}:{name}", {}, replicas)

    def play(*layouts: LayoutPlan) -> list[Expectation]:
        plan = ReferencePlan(
            "", 0.0, f"{JOBS}:{name}", {}, layouts, steps=8, replicas=replicas, extremes=job.proof.extremes
        )
        record = reference_rank.work(plan)
        return [Expectation(record, number) for number in range(len(layouts))]

    one, many = play(plain_layout(), LayoutPlan(replicas=replicas, dtype=dtype))

    def held(constant: bool) -> tuple[Expectation, Expectation]:
        single, several = play(*held_layouts(many.facts, constant=constant))
        return single, several

    return one_process(many, one, held, job)


FEW = (
    "mean",
    "binary",
    "batch_norm_and_dropout",
    "autoencoder_sum",
    "tokens_under_dropout",
    "contrastive",
    "contrastive_over_all_rows",
    "carried_state",
    "carried_mean",
    "masked_tokens",
    "teacher",
    "ignored_rows",
    "deviation_in_forward",
    "masked_by_collate",
    "running_statistics",
    "few_padded",
    "act_norm",
    "prototypes",
    "normalised_gradients",
    "halved_gradients",
    "triplets",
    "observed",
    "chaotic",
    "untrained",
)
CASES = [
    pytest.param(name, replicas, marks=() if name in FEW and replicas == 2 else in_turn(4, number, replicas))
    for number, name in enumerate(ANSWERS)
    for replicas in (2, 3)
]


@pytest.mark.parametrize(("name", "replicas"), CASES)
def test_the_answer(name: str, replicas: int, reference_rank: Ranks) -> None:
    found = answer(reference_rank, name, replicas)
    expected, reason = ANSWERS[name]
    assert found.answer == expected, found
    assert explains(found.reason, reason)
    assert FIELDS.get(name, {}).items() <= (found.reason.fields if found.reason else {}).items(), found.reason
    assert bool(found.advice) == (expected != "yes")
    assert (found.max_difference < 1e-12) == (expected == "yes" or reason == "nothing_moves_in_proof")
    if expected == "yes":
        assert found.compared == found.tensors > 0


@pytest.mark.parametrize("name", ["autoencoder_sum", "mean"])
def test_an_engine_without_float64_hides_no_mistake(name: str, reference_rank: Ranks) -> None:
    """Plain training is played in float64, the engine's layout in float32."""
    found = answer(reference_rank, name, 2, "float32")
    assert found.answer == ANSWERS[name][0], found
    assert explains(found.reason, ANSWERS[name][1])


def test_a_tensor_without_a_true_gradient_is_no_mistake(reference_rank: Ranks) -> None:
    """Such as the bias of attention's keys: it holds the rounding of the others' gradients, of which the kernels for
    another number of rows may make more than the noise did."""
    plan = ReferencePlan("", 0.0, f"{JOBS}:mean", {}, (plain_layout(), LayoutPlan(replicas=2)), steps=2, replicas=2)
    one, many = reference_rank.work(plan).ranks[0].layouts
    name = next(iter(many.from_one))
    furthest = max(moved.distance for moved in many.trainings["sgd"][0].moved.values())

    def same(distance: float) -> bool:
        """Whether the answer is yes where this tensor alone is off, and no noise has moved it."""

        def changed(layout: ReferenceLayoutRecord) -> ReferenceLayoutRecord:
            plain, *noisy = layout.trainings["sgd"]
            plain = replace(plain, moved={**plain.moved, name: Moved(distance, 0.0)})
            noisy = [replace(each, distances={**each.distances, name: 0.0}) for each in noisy]
            from_one = {**many.from_one, name: FromOne(distance, distance)} if layout is many else {}
            return replace(layout, trainings={"sgd": [plain, *noisy]}, from_one=from_one)

        record: Any = SimpleNamespace(ranks=[SimpleNamespace(layouts=[changed(one), changed(many)])])
        return against_one(Expectation(record, 1), Expectation(record, 0)).same

    assert same(1e-16 * furthest) and not same(1e-12 * furthest)


@pytest.mark.parametrize(
    "name", ["carried_state", "tokens_under_dropout", "binary", "teacher", "normalised_gradients", "prototypes"]
)
def test_the_engine_is_the_same_whatever_the_job_does(
    name: str, ranks: Callable[[int], Ranks], reference_rank: Ranks
) -> None:
    verdict = prove(reference_rank, ranks(2), f"{JOBS}:{name}", "ddp")
    assert verdict.verdict == "same", verdict


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("act_norm", "forward_writes_parameters"),
        ("chaotic", "rounding_moves_every_tensor"),
        ("untrained", "nothing_moves_in_proof"),
    ],
)
def test_no_engine_is_the_same_where_nothing_is_shown(
    name: str, reason: str, ranks: Callable[[int], Ranks], reference_rank: Ranks
) -> None:
    verdict = prove(reference_rank, ranks(2), f"{JOBS}:{name}", "ddp")
    assert verdict.verdict == "refused" and explains(verdict.reason, reason), verdict


@pytest.mark.parametrize("name", ["teacher", "prototypes"])
def test_an_engine_of_parts_is_not_blamed_for_what_forward_writes(
    name: str, ranks: Callable[[int], Ranks], reference_rank: Ranks
) -> None:
    job, facts = f"{JOBS}:{name}", engine_facts("fsdp", 2)

    def train(loop: Expectation, own: Expectation | None) -> Record:
        return ranks(2).work(proof_plan(loop, job, "fsdp", 2, None, facts))

    reference = reference_rank.work(reference_plan(job, 2, None, facts))
    verdict = judged(reference, facts, train, replay=reference_rank.work)
    assert verdict.verdict == "refused" and explains(verdict.reason, "parts_lose_what_forward_writes"), verdict


def test_a_bound_that_says_nothing_is_no_evidence() -> None:
    """A tensor whose noise is as large as its movement is counted as not compared, whatever its distance."""

    def compared(spread: float, distance: float, movement: float = 0.1) -> AgainstOne:
        training = SimpleNamespace(
            moved={"w": Moved(movement, 0.1)}, parameters=["w"], micro_batches=[[None]], rates=[[0.1]], evaluation=None
        )
        facts = SimpleNamespace(
            dtype="float64", from_one={"w": FromOne(distance, 0.1)}, counts=(), trainings={"sgd": [training]}
        )
        played: Any = SimpleNamespace(facts=facts, of=lambda name: training, noise_distances=lambda name: {"w": spread})
        return against_one(played, played)

    assert compared(1e-17, 1e-16).same
    assert compared(1e-17, 1e-3).differs
    hidden = compared(0.5, 0.1)
    assert not hidden.same and not hidden.differs and hidden.compared == 0 and hidden.hidden == ["w"]
    assert compared(0.5, 9.0).differs, "further off than any noise"
    still = compared(1e-17, 1e-18, movement=1e-18)
    assert not still.same and not still.differs, "nothing was trained"


def test_a_generator_of_the_models_own_is_refused(reference_rank: Ranks) -> None:
    with pytest.raises(RanksFailed, match="loss_differs_when_computed_again"):
        answer(reference_rank, "own_generator", 2)


RANDOM = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature dropout": lambda x: F.dropout1d(x, 0.3),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
    "normal": lambda x: x + torch.randn_like(x) + torch.normal(x, 1.0) + torch.empty(3).normal_(1.0, 2.0).sum(),
    "uniform": lambda x: x + torch.rand(8) + torch.empty(8).uniform_(1, 2),
    "integers": lambda x: x + torch.randint(3, 9, (8,)) + torch.randperm(8) + torch.empty(8).random_(4),
    "categories": lambda x: x[:, torch.multinomial(x.abs().mean(0), 4)],
    "gumbel": lambda x: F.gumbel_softmax(x),
    "distribution": lambda x: torch.distributions.Normal(x, 1.0).rsample(),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_constant(name: str) -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    found, gradients = [], []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with HeldRandomness(by_row=False) as held_randomness:
            found.append(RANDOM[name](x))
            gradients.append(torch.autograd.grad(found[-1].sum(), x)[0])
        assert held_randomness.draws, "the context has not seen the random numbers"
        assert not held_randomness.unknown
    assert torch.equal(found[0], found[1]) and torch.equal(gradients[0], gradients[1])


def test_batch_norm_leaves_its_statistics_alone() -> None:
    layer = nn.BatchNorm1d(8)
    x = torch.randn(6, 8)
    with HeldRandomness() as held_randomness:
        together, alone = layer(x), layer(x[:1])
    assert held_randomness.batch_statistics and not held_randomness.draws
    assert torch.equal(together[:1], alone)
    assert torch.equal(layer.running_mean, torch.zeros(8))


def test_a_replica_has_its_own_attributes_and_buffers() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    first = ReplicaState(model)
    model(torch.randn(5, 4))
    model[0].hidden = torch.ones(2)
    moved = ReplicaState(model)
    assert set(first.changed(moved)) == {"0.running_mean", "0.running_var", "0.num_batches_tracked", "0.hidden"}
    first.restore(model)
    assert not hasattr(model[0], "hidden") and math.isclose(float(model[0].running_mean.abs().sum()), 0)
    moved.restore(model)
    assert torch.equal(model[0].hidden, torch.ones(2))
