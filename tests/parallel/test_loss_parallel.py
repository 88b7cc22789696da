"""Which output layers tensor parallel ranks split by the vocabulary, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mutations.jobs import Causal, heads, sequences
from samestep import Batch, Job
from samestep.errors import UserError
from samestep.parallel.loss_parallel import OutputLayer, output_layer
from samestep.parallel.tensor_plan import division_of

Loss = Callable[[Tensor, Batch], Tensor]


def found(job: Job, ranks: int = 2) -> OutputLayer:
    return output_layer(job, division_of(job, ranks).plan, ranks)


def with_loss(loss: Loss) -> Job:
    return replace(sequences(), criterion=loss)


def transposed(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output.transpose(1, 2), batch.targets)


def shifted(output: Tensor, batch: Batch) -> Tensor:
    logits = output[:, :-1].float()
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch.targets[:, 1:].reshape(-1), reduction="sum")


def as_module(output: Tensor, batch: Batch) -> Tensor:
    return nn.CrossEntropyLoss()(output.view(-1, output.size(-1)), batch.targets.view(-1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("loss", [sequences().criterion, transposed, shifted, as_module])
def test_the_layer_whose_output_cross_entropy_reads_is_found(loss: Loss) -> None:
    assert found(with_loss(loss)) == OutputLayer("output", "embedding")


def test_a_weight_may_be_its_own() -> None:
    def untied() -> nn.Module:
        model = Causal(8)
        model.output = nn.Linear(16, 12)
        return model

    assert found(replace(sequences(), model=untied)) == OutputLayer("output")


def with_log_softmax(output: Tensor, batch: Batch) -> Tensor:
    return F.nll_loss(output.log_softmax(-1).flatten(0, 1), batch.targets.flatten())


def beside(output: Tensor, batch: Batch) -> Tensor:
    return transposed(output, batch) + 1e-4 * output.logsumexp(-1).square().mean()


def smoothed(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch.targets.flatten(), label_smoothing=0.1)


def weighted(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch.targets.flatten(), weight=torch.ones(12))


def of_probabilities(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output, torch.full((*batch.targets.shape, 12), 1 / 12))


class Scaled(Causal):
    """Logits that are divided by a temperature."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) / 2.0


class Penalised(Causal):
    """A loss beside that reads the output layer's weight."""

    def forward(self, tokens: Tensor) -> Tensor:
        self.penalty = self.output.weight.square().sum()
        return super().forward(tokens)


class HookedEmbedding(Causal):
    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.embedding.register_forward_hook(lambda *_: None)


def of_model(model: type[Causal]) -> Job:
    def built() -> nn.Module:
        torch.manual_seed(18)
        return model(8)

    return replace(sequences(), model=built)


CASES: list[tuple[Any, int, str]] = [
    (with_loss(with_log_softmax), 2, "loss_is_no_cross_entropy_of_a_layer"),
    (with_loss(beside), 2, "loss_reads_logits_otherwise"),
    (with_loss(smoothed), 2, "cross_entropy_of_other_logits"),
    (with_loss(weighted), 2, "cross_entropy_of_other_logits"),
    (with_loss(of_probabilities), 2, "cross_entropy_of_other_logits"),
    (of_model(Scaled), 2, "loss_is_no_cross_entropy_of_a_layer"),
    (of_model(Penalised), 2, "layer_is_not_split_by_the_vocabulary"),
    (of_model(HookedEmbedding), 2, "layer_is_not_split_by_the_vocabulary"),
    (replace(sequences(), parallel={"embedding": "rowwise"}), 2, "layer_is_not_split"),
    (heads(), 2, "layer_does_not_divide"),  # 11 tokens
]


@pytest.mark.parametrize(("job", "ranks", "why"), CASES)
def test_other_losses_are_refused(job: Job, ranks: int, why: str) -> None:
    with pytest.raises(UserError) as raised:
        found(job, ranks)
    said = raised.value.message
    assert (said.fields["why"].id if said.id == "loss_parallel_does_not_fit" else said.id) == why
