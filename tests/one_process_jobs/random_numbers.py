"""Jobs that draw random numbers, or use statistics of a rank's rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Batch, Job

sys.path.insert(0, str(Path(__file__).parents[1]))  # the command runs this file by itself

from one_process_jobs.parts import (
    ODD,
    X,
    Y,
    erased,
    make,
    mask_words,
    masked_count,
    masked_mean,
    mlp,
    net,
    odd,
    words,
)

__all__ = ["ODD"]


# As expected: random numbers and statistics of each rank's rows


@odd
def dropout() -> Job:
    """as expected"""
    return make(mlp(nn.Dropout(0.3)))


@odd
def alpha_dropout() -> Job:
    """as expected"""
    return make(mlp(nn.AlphaDropout(0.3)))


@odd
def lstm_dropout() -> Job:
    """as expected"""
    return words("lstm")


@odd
def transformer_dropout() -> Job:
    """as expected"""
    return words("attention")


@odd
def batch_norm() -> Job:
    """as expected"""
    return make(mlp(nn.BatchNorm1d(16)))


@odd
def batch_norm_and_dropout() -> Job:
    """as expected"""
    return make(mlp(nn.BatchNorm1d(16), nn.Dropout(0.2)))


@odd
def batch_norm_without_momentum() -> Job:
    """as expected"""
    return make(mlp(nn.BatchNorm1d(16, momentum=None)))


@odd
def running_instance_norm() -> Job:
    """as expected: its averages are of a rank's rows, and the evaluation uses them"""
    return make(
        lambda: nn.Sequential(
            nn.Linear(12, 16),
            nn.Unflatten(1, (4, 4)),
            nn.InstanceNorm1d(4, track_running_stats=True),
            nn.Flatten(),
            nn.Linear(16, 3),
        )
    )


def _norm_of_evaluation(self: Any, hidden: Tensor) -> Tensor:
    normed = F.batch_norm(hidden.detach() if self.training else hidden, self.mean, self.var, training=self.training)
    return hidden if self.training else normed


@odd
def batch_norm_of_evaluation() -> Job:
    """as expected: only the evaluation normalises"""
    job = net(_norm_of_evaluation, mean=torch.zeros(16), var=torch.ones(16))
    return make(job, evaluation=TensorDataset(X[:20], Y[:20]))


@odd
def batch_norm_of_no_evaluation() -> Job:
    """as expected: what is saved differs"""
    return make(net(_norm_of_evaluation, mean=torch.zeros(16), var=torch.ones(16)))


@odd
def gaussian_noise() -> Job:
    """as expected"""
    return make(net(lambda self, hidden: hidden + 0.1 * torch.randn_like(hidden)))


@odd
def noise_of_a_batch() -> Job:
    """as expected: one number for all rows"""
    return make(net(lambda self, hidden: hidden * torch.rand(())))


@odd
def noise_of_features() -> Job:
    """as expected: as many features as rows of a batch"""
    return make(net(lambda self, hidden: hidden * torch.rand(16)), global_batch=16)


@odd
def noise_time_first() -> Job:
    """as expected: the rows are the second dimension"""

    def change(self: Any, hidden: Tensor) -> Tensor:
        sequence = hidden.view(-1, 4, 4).transpose(0, 1)
        return (sequence + 0.1 * torch.randn(sequence.shape)).transpose(0, 1).flatten(1)

    return make(net(change))


@odd
def noise_of_flat_rows() -> Job:
    """as expected: four places of each row in one dimension"""

    def change(self: Any, hidden: Tensor) -> Tensor:
        flat = hidden.view(-1, 4)
        return (flat + 0.1 * torch.rand(flat.shape)).view(-1, 16)

    return make(net(change))


@odd
def stochastic_depth() -> Job:
    """as expected: of each row"""
    return make(net(lambda self, hidden: hidden * hidden.new_empty(len(hidden), 1).bernoulli_(0.7)))


@odd
def layer_drop() -> Job:
    """as expected: of the batch"""
    return make(net(lambda self, hidden: hidden if float(torch.rand(())) < 0.5 else hidden.tanh()))


@odd
def gumbel() -> Job:
    """as expected"""
    return make(net(lambda self, hidden: F.gumbel_softmax(hidden)))


@odd
def randomized_relu() -> Job:
    """as expected"""
    return make(mlp(nn.RReLU()))


class Latent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 8), nn.Linear(4, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, scale = self.encoder(x).chunk(2, 1)
        return self.decoder(torch.distributions.Normal(mean, scale.exp()).rsample()), mean, scale


def elbo(output: Any, batch: Batch) -> Tensor:
    decoded, mean, scale = output
    return ((decoded - batch.inputs) ** 2).sum(1).add((mean**2 - scale).sum(1)).mean()


@odd
def autoencoder() -> Job:
    """as expected"""
    return make(Latent, elbo)


@odd
def autoencoder_of_a_sum() -> Job:
    """no criterion_is_a_sum"""
    return make(Latent, lambda output, batch: elbo(output, batch) * len(batch.inputs))


@odd
def diffusion() -> Job:
    """as expected: a time and a noise of each row"""

    def forward(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        times = torch.randint(0, 10, (len(batch.inputs), 1)) / 10
        noise = torch.randn_like(batch.inputs)
        return model(batch.inputs * (1 - times) + noise * times), noise

    return make(lambda: nn.Linear(12, 12), lambda output, batch: F.mse_loss(*output), forward=forward)


@odd
def masked_autoencoder() -> Job:
    """as expected: as many places of each row are hidden"""

    def change(self: Any, hidden: Tensor) -> Tensor:
        hidden_places = torch.rand(len(hidden), 16).argsort(1)[:, :4]
        return hidden.scatter(1, hidden_places, 0.0)

    return make(net(change))


@odd
def beta_mixture_in_forward() -> Job:
    """as expected: one number for all rows, and each rank mixes its own"""

    def change(self: Any, hidden: Tensor) -> Tensor:
        share = torch.distributions.Beta(2.0, 2.0).sample()
        return share * hidden + (1 - share) * hidden[torch.randperm(len(hidden))]

    return make(net(change))


def _mixed(samples: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    inputs, targets = (torch.stack(each) for each in zip(*samples))
    share = float(np.random.beta(2.0, 2.0))
    other = torch.randperm(len(inputs))
    return share * inputs + (1 - share) * inputs[other], targets, targets[other]


@odd
def mixup() -> Job:
    """as expected: collate mixes a rank's rows"""

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(output, batch.data[1]) + 0.3 * F.cross_entropy(output, batch.data[2])

    return make(mlp(), criterion, collate=_mixed, forward=lambda model, batch: model(batch.data[0]))


@odd
def mixup_of_a_sum() -> Job:
    """no criterion_is_a_sum"""

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(output, batch.data[1], reduction="sum")

    return make(mlp(), criterion, collate=_mixed, forward=lambda model, batch: model(batch.data[0]))


@odd
def mixup_and_class_weights() -> Job:
    """no rows_weigh_unequally"""
    of_class = torch.tensor([1.0, 5.0, 0.5])

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(output, batch.data[1], weight=of_class.to(output))

    return make(mlp(), criterion, collate=_mixed, forward=lambda model, batch: model(batch.data[0]))


@odd
def erased_by_collate() -> Job:
    """as expected"""
    return make(mlp(), collate=erased)


@odd
def erased_by_collate_and_dropout() -> Job:
    """as expected"""
    return make(mlp(nn.Dropout(0.2)), collate=erased)


@odd
def erased_time_first() -> Job:
    """as expected: collate returns the rows as the second dimension"""

    def collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
        inputs, targets = erased(samples)
        return inputs.view(-1, 3, 4).transpose(0, 1), targets

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch.inputs.transpose(0, 1).flatten(1))  # type: ignore[no-any-return]

    return make(mlp(), collate=collate, forward=forward)


@odd
def masked_words_with_batch_weight() -> Job:
    """as expected: collate draws, and the batch says what it weighs"""
    return words(criterion=masked_mean, collate=mask_words, batch_weight=masked_count)


@odd
def masked_words_with_batch_weight_in_micro_batches() -> Job:
    """as expected"""
    return words(criterion=masked_mean, collate=mask_words, batch_weight=masked_count, micro_batch=4)


@odd
def masked_words_of_a_transformer() -> Job:
    """as expected"""
    return words("attention", masked_mean, collate=mask_words, batch_weight=masked_count)


@odd
def masked_words_over_a_constant() -> Job:
    """as expected: each row's sum divided by its length, which is not drawn"""

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        losses = F.cross_entropy(output.flatten(0, 1), batch.targets.flatten(), reduction="none")
        return losses.view(-1, 9).sum(1).div(9).mean()

    return words(criterion=criterion, collate=mask_words)
