"""Jobs that make a mistake on several ranks, and those of which nothing can be shown."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Batch, Job

sys.path.insert(0, str(Path(__file__).parents[1]))  # the command runs this file by itself

from one_process_jobs.parts import (
    FEW,
    LENGTHS,
    ODD,
    PADDED,
    Texts,
    Words,
    X,
    Y,
    _random,
    erased,
    make,
    mask_words,
    masked_count,
    masked_mean,
    mean_loss,
    mlp,
    net,
    odd,
    stacked,
    words,
)

__all__ = ["ODD"]


# Mistakes


@odd
def sum_of_rows() -> Job:
    """no criterion_is_a_sum"""
    return make(mlp(), lambda output, batch: F.cross_entropy(output, batch.targets, reduction="sum"))


@odd
def sum_under_dropout() -> Job:
    """no criterion_is_a_sum"""
    return make(mlp(nn.Dropout(0.2)), lambda output, batch: F.cross_entropy(output, batch.targets, reduction="sum"))


@odd
def sum_under_batch_norm() -> Job:
    """no criterion_is_a_sum"""
    return make(mlp(nn.BatchNorm1d(16)), lambda output, batch: F.cross_entropy(output, batch.targets, reduction="sum"))


@odd
def mean_over_words() -> Job:
    """no rows_weigh_unequally"""
    return words(inputs=PADDED)


def _few(rows: list[int], value: int) -> Tensor:
    labels = torch.randint(2, 20, (1200, 9), generator=_random(5))
    labels[rows, 4:] = value
    return labels


@odd
def five_padded_of_1200() -> Job:
    """no rows_weigh_unequally"""
    return words(inputs=_few(FEW, 0))


@odd
def five_padded_with_another_number() -> Job:
    """no rows_weigh_unequally: of 1,200"""
    labels = _few(FEW, 20)
    return words(
        criterion=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch.targets.flatten(), ignore_index=20),
        inputs=labels,
    )


@odd
def one_ignored_of_1200() -> Job:
    """no rows_that_weigh_nothing"""
    targets = torch.arange(1200) % 3
    targets[777] = -100
    return make(mlp(), train=TensorDataset(torch.randn(1200, 12, generator=_random(6)), targets))


@odd
def three_of_a_rare_class() -> Job:
    """no rows_weigh_unequally: of 1,500"""
    targets = torch.arange(1500) % 2 * 2
    targets[[101, 707, 1301]] = 1
    of_class = torch.tensor([1.0, 9.0, 1.0])
    return make(
        mlp(),
        lambda output, batch: F.cross_entropy(output, batch.targets, weight=of_class.to(output)),
        train=TensorDataset(torch.randn(1500, 12, generator=_random(7)), targets),
    )


@odd
def few_unlike_in_a_mask() -> Job:
    """no rows_weigh_unequally: the mask is a tensor of its own"""
    masks = torch.ones(1200, 9, dtype=torch.bool)
    masks[FEW, 6:] = False
    inputs = torch.randint(2, 20, (1200, 9), generator=_random(8))

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        losses = F.cross_entropy(output.flatten(0, 1), batch.data[0].flatten(), reduction="none").view(-1, 9)
        return losses[batch.data[1]].mean()

    return make(
        Words,
        criterion,
        train=TensorDataset(inputs, masks),
        forward=lambda model, batch: model(batch.data[0]),
    )


@odd
def few_light_rows() -> Job:
    """no rows_weigh_unequally: the weight is a number of the sample"""
    weights = torch.ones(1200)
    weights[FEW] = 0.2
    inputs = torch.randn(1200, 12, generator=_random(9))

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        return ((output.square().sum(1)) * batch.targets).sum() / batch.targets.sum()

    return make(mlp(), criterion, train=TensorDataset(inputs, weights))


@odd
def few_short_texts() -> Job:
    """no rows_weigh_unequally"""
    return make(
        Words,
        lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch.data.flatten(), ignore_index=0),
        train=Texts(),
        collate=stacked,
        forward=lambda model, batch: model(batch.data),
    )


@odd
def few_short_texts_with_batch_weight() -> Job:
    """yes"""
    return replace(few_short_texts(), batch_weight=lambda batch: (batch.data != 0).sum())


@odd
def padding_in_the_mean() -> Job:
    """no output_depends_on_padding: a row's mean over its places, which padding changes"""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.last = nn.Embedding(21, 8), nn.Linear(8, 3)

        def forward(self, batch: Tensor) -> Tensor:
            return self.last(self.embedding(batch).mean(1))  # type: ignore[no-any-return]

    return make(
        Mean,
        lambda output, batch: output.square().sum(1).mean(),
        train=Texts(lengths=LENGTHS),
        collate=stacked,
        forward=lambda model, batch: model(batch.data),
    )


@odd
def masked_words() -> Job:
    """no rows_that_weigh_nothing: as DataCollatorForLanguageModeling and the model's own loss"""
    return words(criterion=masked_mean, collate=mask_words)


@odd
def masked_words_of_a_transformer_without_weight() -> Job:
    """no rows_that_weigh_nothing"""
    return words("attention", masked_mean, collate=mask_words)


@odd
def masked_words_with_a_weight_of_all_words() -> Job:
    """no rows_that_weigh_nothing: all places weigh, but few are masked"""
    return words(criterion=masked_mean, collate=mask_words, batch_weight=lambda batch: batch.targets.numel())


@odd
def masked_words_in_criterion() -> Job:
    """no rows_weigh_unequally: a mean over what is drawn"""

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        losses = F.cross_entropy(output.flatten(0, 1), batch.targets.flatten(), reduction="none").view(-1, 9)
        masked = torch.rand(losses.shape) < 0.4
        return (losses * masked).sum() / masked.sum()

    return words(criterion=criterion)


@odd
def class_weights() -> Job:
    """no rows_weigh_unequally"""
    of_class = torch.tensor([1.0, 5.0, 0.5])
    return make(mlp(), lambda output, batch: F.cross_entropy(output, batch.targets, weight=of_class.to(output)))


@odd
def weight_that_criterion_ignores() -> Job:
    """no criterion_ignores_job_weight"""
    return make(mlp(), weight=lambda index: 1.0 + index % 3)


@odd
def batch_weight_that_criterion_ignores() -> Job:
    """no criterion_ignores_job_weight"""
    return make(mlp(), batch_weight=lambda batch: 1.0 + batch.targets.sum())


@odd
def ignored_targets() -> Job:
    """no rows_that_weigh_nothing"""
    return make(mlp(), train=TensorDataset(X, torch.where(torch.arange(64) % 4 == 1, -100, Y)))


@odd
def ignored_targets_with_batch_weight() -> Job:
    """yes"""
    return make(
        mlp(),
        lambda output, batch: (
            F.cross_entropy(output, batch.targets, reduction="sum") / (batch.targets != -100).sum().clamp(min=1)
        ),
        train=TensorDataset(X, torch.where(torch.arange(64) % 4 == 1, -100, Y)),
        batch_weight=masked_count,
    )


@odd
def contrastive() -> Job:
    """no criterion_looks_at_other_rows"""
    return make(mlp(), lambda output, batch: F.cross_entropy(output @ output.T, torch.arange(len(output))))


@odd
def covariance() -> Job:
    """no criterion_looks_at_other_rows: of the batch's outputs"""
    return make(mlp(), lambda output, batch: mean_loss(output, batch) + output.std(0).mean())


@odd
def root_of_the_mean() -> Job:
    """no criterion_looks_at_other_rows: no mean of the rows' losses"""
    return make(mlp(), lambda output, batch: mean_loss(output, batch).sqrt())


@odd
def hardest_rows() -> Job:
    """no criterion_looks_at_other_rows: the half with the largest losses"""

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        losses = F.cross_entropy(output, batch.targets, reduction="none")
        return losses.topk(max(1, len(losses) // 2)).values.mean()

    return make(mlp(), criterion)


@odd
def centred_in_forward() -> Job:
    """no output_depends_on_rows_beside"""
    return make(net(lambda self, hidden: hidden - hidden.mean(0)))


@odd
def centred_in_forward_under_dropout() -> Job:
    """no output_depends_on_rows_beside"""
    return make(net(lambda self, hidden: F.dropout(hidden - hidden.mean(0), 0.1, self.training)))


@odd
def running_mean_by_hand() -> Job:
    """no state_kept_from_batch_to_batch: which only the evaluation uses"""

    def change(self: Any, hidden: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
            return hidden
        return hidden - self.mean

    return make(net(change, mean=torch.zeros(16)), evaluation=TensorDataset(X[:20], Y[:20]))


@odd
def running_mean_of_no_evaluation() -> Job:
    """no state_kept_from_batch_to_batch: what is saved differs"""

    def change(self: Any, hidden: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return hidden

    return make(net(change, mean=torch.zeros(16)))


@odd
def largest_value_so_far() -> Job:
    """no state_kept_from_batch_to_batch: as an observer of quantisation keeps it"""

    def change(self: Any, hidden: Tensor) -> Tensor:
        if self.training:
            self.largest.copy_(torch.maximum(self.largest, hidden.detach().abs().max()))
        return hidden / (1 if self.training else self.largest)

    return make(net(change, largest=torch.zeros(())))


@odd
def counts_rows() -> Job:
    """no state_kept_from_batch_to_batch"""

    def change(self: Any, hidden: Tensor) -> Tensor:
        if self.training:
            self.rows += len(hidden)
        return hidden

    return make(net(change, rows=torch.zeros((), dtype=torch.int64)))


@odd
def queue_of_rows() -> Job:
    """no state_kept_from_batch_to_batch"""

    def change(self: Any, hidden: Tensor) -> Tensor:
        changed = hidden + self.queue.mean(0)
        self.queue = torch.cat([hidden.detach(), self.queue])[:16]
        return changed

    return make(net(change, queue=torch.zeros(16, 16)))


@odd
def hidden_state() -> Job:
    """no state_kept_from_batch_to_batch: as an attribute"""

    def change(self: Any, hidden: Tensor) -> Tensor:
        changed = hidden + getattr(self, "state", 0.0)
        self.state = hidden.detach().mean(0)
        return changed

    return make(net(change))


@odd
def count_in_the_divisor() -> Job:
    """no criterion_is_a_sum: divided by the global batch, on all ranks"""
    return make(
        mlp(nn.Dropout(0.1)), lambda output, batch: F.cross_entropy(output, batch.targets, reduction="sum") / 12
    )


# Not known


@odd
def rows_mixed_by_a_draw() -> Job:
    """not known: each rank mixes its own rows, which are those that the draw of each row chooses"""
    return make(net(lambda self, hidden: hidden + 0.2 * hidden[torch.rand(len(hidden)).argsort()]))


@odd
def ragged_collate() -> Job:
    """not known: collate draws, and returns no place for each row"""

    def collate(samples: list[Any]) -> dict[str, Tensor]:
        inputs, _ = erased(samples)
        return {"all": inputs.flatten()}

    return make(
        mlp(),
        lambda output, batch: output.square().sum(1).mean(),
        collate=collate,
        forward=lambda model, batch: model(batch.data["all"].view(-1, 12)),
    )
