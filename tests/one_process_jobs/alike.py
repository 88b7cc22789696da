"""Jobs that N ranks train as one process does."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from samestep import Batch, Job, Weighted
from samestep.job import ByLength

sys.path.insert(0, str(Path(__file__).parents[1]))  # the command runs this file by itself

from one_process_jobs.parts import (
    LENGTHS,
    ODD,
    PADDED,
    X,
    Y,
    make,
    mean_loss,
    mlp,
    net,
    odd,
    words,
)

__all__ = ["ODD"]


# Nothing that one process does otherwise


@odd
def plain() -> Job:
    """yes"""
    return make(mlp())


@odd
def layer_norm() -> Job:
    """yes"""
    return make(mlp(nn.LayerNorm(16)))


@odd
def group_norm() -> Job:
    """yes"""
    return make(mlp(nn.GroupNorm(4, 16)))


@odd
def frozen_batch_norm() -> Job:
    """yes: in evaluation mode it uses its statistics"""

    return make(mlp(nn.BatchNorm1d(16).eval()))


@odd
def instance_norm() -> Job:
    """yes: each row by itself"""
    return make(net(lambda self, hidden: F.instance_norm(hidden.view(-1, 4, 4)).flatten(1)))


@odd
def micro_batches() -> Job:
    """yes"""
    return make(mlp(), micro_batch=2)


@odd
def uneven_rows() -> Job:
    """yes"""
    return make(mlp(), train=TensorDataset(X[:61], Y[:61]), global_batch=11)


@odd
def one_row_in_the_last_batch() -> Job:
    """yes: a rank has none"""
    return make(mlp(), train=TensorDataset(X[:49], Y[:49]))


@odd
def dropped_last_batch() -> Job:
    """yes"""
    return make(mlp(), last="drop")


@odd
def clipped() -> Job:
    """yes"""
    return make(mlp(), clip_norm=0.05)


@odd
def averaged_weights() -> Job:
    """yes"""
    return make(mlp(), ema=0.9, evaluation=TensorDataset(X[:20], Y[:20]))


@odd
def drawn_by_weight() -> Job:
    """yes"""
    return make(mlp(), order=Weighted([1.0 + (i % 5) for i in range(64)]))


@odd
def by_length() -> Job:
    """yes: every row has as many words"""
    return words(order=ByLength(LENGTHS.tolist()))


@odd
def augmented() -> Job:
    """yes: drawn for each sample"""

    def augment(sample: Any, generator: torch.Generator) -> Any:
        return sample[0] + 0.1 * torch.randn(12, generator=generator), sample[1]

    return make(mlp(), augment=augment)


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return X[index] + 0.1 * float(np.random.rand()) + 0.1 * random.random(), Y[index]


@odd
def dataset_draws() -> Job:
    """yes: keyed by the sample"""
    return make(mlp(), train=Noisy())


@odd
def word_mean_without_padding() -> Job:
    """yes"""
    return words()


@odd
def padded_mean_of_each_row() -> Job:
    """yes: a mean over each row's words, then over the rows"""

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        losses = F.cross_entropy(output.flatten(0, 1), batch.targets.flatten(), reduction="none").view(-1, 9)
        mask = batch.targets != 0
        return ((losses * mask).sum(1) / mask.sum(1)).mean()

    return words(criterion=criterion, inputs=PADDED)


@odd
def weighed_words() -> Job:
    """yes"""
    return words(inputs=PADDED, weight=lambda index: float(LENGTHS[index]))


@odd
def batch_weighs_words() -> Job:
    """yes"""
    return words(inputs=PADDED, batch_weight=lambda batch: (batch.targets != 0).sum())


@odd
def batch_weighs_words_in_micro_batches() -> Job:
    """yes"""
    return words(inputs=PADDED, batch_weight=lambda batch: (batch.targets != 0).sum(), micro_batch=2)


@odd
def class_weights_with_weight() -> Job:
    """yes"""
    of_class = torch.tensor([1.0, 5.0, 0.5])
    return make(
        mlp(),
        lambda output, batch: F.cross_entropy(output, batch.targets, weight=of_class.to(output)),
        weight=lambda index: float(of_class[Y[index]]),
    )


@odd
def class_weights_with_batch_weight() -> Job:
    """yes"""
    of_class = torch.tensor([1.0, 5.0, 0.5])
    return make(
        mlp(),
        lambda output, batch: F.cross_entropy(output, batch.targets, weight=of_class.to(output)),
        batch_weight=lambda batch: of_class[batch.targets].sum(),
    )


@odd
def sum_over_the_global_batch() -> Job:
    """no criterion_is_a_sum: whose divisor is a number, right where every rank had as many rows"""
    return make(mlp(), lambda output, batch: F.cross_entropy(output, batch.targets, reduction="sum") / 12)


@odd
def contrastive_over_all_rows() -> Job:
    """yes"""
    return make(
        mlp(), lambda output, batch: F.cross_entropy(output @ output.T, torch.arange(len(output))), gather_outputs=True
    )


@odd
def constant_buffer() -> Job:
    """yes"""
    return make(net(lambda self, hidden: hidden + self.shift, shift=torch.ones(16)))


@odd
def counts_passes() -> Job:
    """yes: each rank counts as many as one process"""

    def change(self: Any, hidden: Tensor) -> Tensor:
        self.passes += 1
        return hidden

    return make(net(change, passes=torch.zeros((), dtype=torch.int64)))


@odd
def counts_passes_of_micro_batches() -> Job:
    """yes: of which one process has more"""

    def change(self: Any, hidden: Tensor) -> Tensor:
        self.passes += 1
        return hidden

    return make(net(change, passes=torch.zeros((), dtype=torch.int64)), micro_batch=2)


@odd
def spectral_norm() -> Job:
    """yes"""
    return make(lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(12, 16)), nn.Linear(16, 3)))


@odd
def weight_norm() -> Job:
    """yes"""
    return make(lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(12, 16)), nn.Linear(16, 3)))


@odd
def regularised_in_criterion() -> Job:
    """yes: a penalty on each row's output"""
    return make(mlp(), lambda output, batch: mean_loss(output, batch) + 0.1 * (output**2).mean())


@odd
def attention_without_dropout() -> Job:
    """yes"""
    return make(
        lambda: nn.Sequential(nn.Linear(12, 8), nn.Unflatten(1, (2, 4)), nn.Flatten(), nn.Linear(8, 3)), micro_batch=3
    )


@odd
def draws_nothing_in_training() -> Job:
    """yes: dropout of probability 0"""
    return make(mlp(nn.Dropout(0.0)))


@odd
def evaluates_with_dropout_layer() -> Job:
    """as expected"""
    return make(mlp(nn.Dropout(0.2)), evaluation=TensorDataset(X[:20], Y[:20]))
