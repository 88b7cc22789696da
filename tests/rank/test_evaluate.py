"""Evaluation inside a training leaves no trace: the mode, the random stream and the buffers are as they were."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from command import WATCHED
from conformance import jobs_drawn
from inspected_job import inspected_job
from mutations import jobs as mutated
from ranks import Ranks
from said import refuses
from samestep import Job, Recipe
from samestep.errors import UserError
from samestep.job import Batch
from samestep.message import message
from samestep.rank.evaluate import evaluate
from samestep.records.plan import Plan, ProveTask, RunTask
from samestep.reference import evaluation as reference
from samestep.tasks.inspect.dry_run import dry_evaluation
from samestep.tasks.proof_job import proof_job
from samestep.training import Run
from samestep.world import World


@pytest.mark.parametrize("training", [True, False])
def test_it_leaves_mode_random_stream_and_buffers_as_they_were(training: bool) -> None:
    job = mutated.conv()
    model = job.model().train(training)
    frozen = model[0].eval()  # a part that its owner keeps in evaluation mode
    torch.manual_seed(5)
    before = torch.get_rng_state(), {name: buffer.clone() for name, buffer in model.named_buffers()}
    evaluate(job, model, World())
    assert model.training is training
    assert not frozen.training
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(torch.equal(buffer, before[1][name]) for name, buffer in model.named_buffers())


def test_last_drop_is_of_the_training_alone() -> None:
    job = jobs_drawn.job(rows=40, global_batch=16)
    fewer: Any = Subset(job.evaluation, range(5))  # type: ignore[arg-type]
    job = replace(job, evaluation=fewer, last="drop")
    assert evaluate(job, job.model(), World()).rows == 5


def last() -> Any:
    """The target of the last row: it shows in which order the chunks are put together."""
    from torchmetrics import Metric  # takes seconds

    class Last(Metric):
        full_state_update = False

        def __init__(self) -> None:
            super().__init__()
            self.add_state("seen", [], dist_reduce_fx="cat")
            self.seen: list[torch.Tensor]

        def update(self, output: torch.Tensor, targets: torch.Tensor) -> None:
            self.seen.append(targets)

        def compute(self) -> torch.Tensor:
            return torch.cat(list(self.seen))[-1].float()

    return Last()


def test_a_counted_metric_is_that_of_all_rows_as_rank_0_merges_them(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    """Its value shows which rows were merged, and on which rank it was taken."""
    plan = Plan("", 0.0, f"{WATCHED}:merged", {}, "ddp", trainings=(RunTask(str(tmp_path / "weights.safetensors")),))
    seen = [each.evaluation for each in ranks(2).work(plan).training("run")]
    assert [each.sums["merged"] for each in seen if each] == [131, 131]


@pytest.mark.parametrize("workers", [0, 2])
def test_chunks_are_put_together_in_their_order(workers: int) -> None:
    job = jobs_drawn.job(rows=40, global_batch=4)
    targets = [int(target) for _, _, target in job.evaluation]  # type: ignore[union-attr, attr-defined]
    rows = Subset(job.evaluation, range(21))  # type: ignore[arg-type]  # which is read by workers, where there are some
    job = replace(job, evaluation=rows, metrics={"last": last()}, workers=workers)

    def pairs(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([inputs for inputs, _, _ in samples]), torch.stack([target for _, _, target in samples])

    def criterion(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(output, batch.targets)

    paired = replace(job, collate=pairs, forward=lambda model, batch: model(batch.inputs), criterion=criterion)
    found = evaluate(paired, paired.model(), World())
    assert (found.rows, found.sums["last"], found.indices) == (21, targets[20], list(range(21)))


def test_what_torchmetrics_says_is_better_is_known() -> None:
    found = inspected_job(f"{WATCHED}:job", {"many": "true"}, 2).evaluation.metrics
    assert {name: found[name] for name in ("loss", "perplexity", "f1", "accuracy")} == {
        "loss": "min",
        "perplexity": "min",
        "f1": "max",
        "accuracy": "max",
    }


def test_evaluating_between_steps_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    job = jobs_drawn.job(rows=16, global_batch=4)
    clock, evaluated_s = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + evaluated_s[0])

    class Looks:
        def begin(self, state: object) -> None: ...

        def is_due(self, done: int, steps_per_epoch: int) -> bool:
            return done == 2

        def evaluate(self, done: int) -> bool:
            evaluated_s[0] += 3600
            return False

    run = Run(job, World(), 4, evaluator=Looks())
    model = job.model()
    run.register(model, torch.optim.SGD(model.parameters()))
    for batch in run.batches():
        run.step(run.loss(model, batch))
    assert len(run.observations().step_s) == 4 and max(run.observations().step_s) < 3600


def test_as_many_rows_at_once_as_the_micro_batch_and_nothing_is_kept_for_a_gradient() -> None:
    seen = []

    def forward(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        seen.append((batch.micro_batch.rows, torch.is_grad_enabled()))
        return jobs_drawn.job().forward(model, batch)  # type: ignore[no-any-return]

    job = replace(jobs_drawn.job(rows=40, global_batch=8), micro_batch=5, forward=forward)
    evaluate(job, job.model(), World())
    rows = len(job.evaluation)  # type: ignore[arg-type]
    assert seen == [(5, False)] * (rows // 5) + [(rows % 5, False)] * bool(rows % 5)


def test_rows_that_weigh_nothing_may_have_no_mean() -> None:
    job = jobs_drawn.job(rows=40, global_batch=8)

    def mean(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        weight = batch.micro_batch.weight
        return torch.tensor(weight / weight if weight else float("nan"))

    job = replace(job, criterion=mean, micro_batch=1, evaluation_weight=lambda index: float(index % 2))
    assert evaluate(job, job.model(), World()).means()["loss"] == 1.0


def test_memory_that_evaluation_lacks_is_told_as_its_own() -> None:
    def greedy(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return torch.empty(batch.micro_batch.rows, 1 << 50)

    job = replace(jobs_drawn.job(rows=40, global_batch=8), forward=greedy)
    remedy = message("evaluate_fewer_rows_at_once", rows=4)
    with refuses("evaluation_out_of_memory", rank=0, rows=8, remedy=remedy):
        evaluate(job, job.model(), World())
    with refuses("evaluation_out_of_memory", rank=0, rows=1, remedy=message("evaluate_elsewhere")):
        evaluate(replace(job, micro_batch=1), job.model(), World())


def test_predictions_that_are_no_rows_are_refused() -> None:
    job = jobs_drawn.job(rows=40, global_batch=4)
    forward, criterion = job.forward, job.criterion
    pairs = replace(
        job,
        forward=lambda model, batch: (forward(model, batch), None),
        criterion=lambda output, batch: criterion(output[0], batch),
        metrics={},
    )
    assert evaluate(pairs, pairs.model(), World()).predictions is None
    with pytest.raises(UserError, match=r"tuple; leave --predictions"):
        evaluate(pairs, pairs.model(), World(), predictions=True)


def mixed(samples: list[Any]) -> Any:
    inputs, targets = default_collate(samples)
    return inputs.lerp(inputs.flip(0), torch.rand(())), targets


def sloped(model: nn.Module, batch: Batch) -> Tensor:
    """As a model of forces: its output, and its derivative by the inputs."""
    inputs = batch.inputs.detach().requires_grad_()
    output = model(inputs)
    return output + torch.autograd.grad(output.sum(), inputs, create_graph=True)[0].sum(1, keepdim=True)


def followed(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The output, and the inputs that it follows from, whose derivative the criterion takes."""
    inputs = batch.inputs.detach().requires_grad_()
    return model(inputs), inputs


def slope(output: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
    """As a gradient penalty."""
    return torch.autograd.grad(output[0].sum(), output[1], create_graph=True)[0].norm(dim=1).mean()


def _learning(**changed: Any) -> Job:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    inputs = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    rows = TensorDataset(inputs, inputs[:, :1])
    usual: dict[str, Any] = {
        "model": model,
        "criterion": lambda output, batch: (output - batch.targets).pow(2).mean(),
        "optimizer": Recipe(torch.optim.SGD, {"lr": 0.1}),
        "train": rows,
        "evaluation": rows,
        "global_batch": 4,
    }
    return Job(**{**usual, **changed})


def test_the_evaluation_has_a_collate_of_its_own() -> None:
    """The training's mixes rows; and the reference, and the proof's job, know which is which."""
    plain, own = _learning(), _learning(collate=mixed, evaluation_collate=default_collate)
    expected = evaluate(plain, plain.model(), World()).sums["loss"]
    assert evaluate(own, own.model(), World()).sums["loss"] == expected
    assert evaluate(_learning(collate=mixed), own.model(), World()).sums["loss"] != expected
    small = proof_job(own, ProveTask("sgd", 4, "float64", 1, 0.1))
    played = reference.evaluate(small, small.model().state_dict(), "cpu", twice=True)
    found = evaluate(small, small.model(), World())
    assert played is not None and not played.unsteady
    assert played.sums["loss"] == pytest.approx(found.sums["loss"], rel=1e-12)


@pytest.mark.parametrize(("at_most", "unsteady"), [(20, ("loss",)), (64, ())])
def test_a_loss_of_the_largest_rows_is_seen_where_engines_take_more_rows_at_once(
    at_most: int, unsteady: tuple[str, ...]
) -> None:
    """Of 16 rows at once the 20 largest are all: a sum that an engine then finds otherwise is no fault of its own."""

    def hardest(output: Tensor, batch: Batch) -> Tensor:
        losses = (output - batch.targets).pow(2).mean(1)
        return losses.topk(min(at_most, len(losses))).values.mean()

    inputs = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    job = _learning(criterion=hardest, evaluation=TensorDataset(inputs, inputs[:, :1]), global_batch=64)
    played = reference.evaluate(job, job.model().double().state_dict(), "cpu", twice=True)
    assert played is not None and played.unsteady == unsteady


def test_an_evaluation_that_draws_is_seen() -> None:
    noisy = _learning(forward=lambda model, batch: model(batch.inputs + torch.rand(())))
    cases = {
        (): _learning(collate=mixed, evaluation_collate=default_collate),
        ("collate",): _learning(collate=mixed),
        ("model",): noisy,
        ("dataset",): _learning(evaluation=Drawn()),
    }
    for draws, job in cases.items():
        assert dry_evaluation(job, job.model(), "cpu").draws == draws


class Drawn(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.full((4,), random.random()), torch.ones(1)


def test_a_model_that_computes_a_derivative_is_evaluated() -> None:
    job = _learning(forward=sloped)
    found = evaluate(job, job.model(), World())
    played = reference.evaluate(job, job.model().state_dict(), "cpu", twice=True)
    with torch.enable_grad():
        output = sloped(job.model(), Batch(job.evaluation[:], None))  # type: ignore[index, arg-type]
    expected = float((output - job.evaluation[:][1]).pow(2).sum())  # type: ignore[index]
    assert played is not None
    assert found.sums["loss"] == pytest.approx(expected) == pytest.approx(played.sums["loss"])


def test_a_criterion_that_computes_a_derivative_is_evaluated() -> None:
    job = _learning(forward=followed, criterion=slope)
    assert dry_evaluation(job, job.model(), "cpu").has_loss
    assert evaluate(job, job.model(), World()).means()["loss"] > 0
