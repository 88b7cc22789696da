"""Matrix factorisation of ratings, as the many MovieLens scripts: embeddings and biases of users and films, MSE.

Embeddings have dense gradients here: `sparse=True` is refused.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Recipe


class Factors(nn.Module):
    def __init__(self, users: int, films: int, width: int) -> None:
        super().__init__()
        self.user, self.film = nn.Embedding(users, width), nn.Embedding(films, width)
        self.user_bias, self.film_bias = nn.Embedding(users, 1), nn.Embedding(films, 1)
        for table in (self.user, self.film):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, pairs: Tensor) -> Tensor:
        user, film = pairs.unbind(1)
        return (self.user(user) * self.film(film)).sum(1) + (self.user_bias(user) + self.film_bias(film))[:, 0]


def job(ratings: int = 2000, batch_size: int = 64, lr: float = 0.01, epochs: int = 10, width: int = 8) -> Job:
    draw, users, films = torch.Generator().manual_seed(0), 60, 40
    taste, kind = torch.randn(users, 3, generator=draw), torch.randn(films, 3, generator=draw)
    pairs = torch.stack([torch.randint(n, (ratings,), generator=draw) for n in (users, films)], 1)
    stars = (3 + (taste[pairs[:, 0]] * kind[pairs[:, 1]]).sum(1)).clamp(1, 5)
    held_out = ratings // 10

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Factors(users, films, width)

    return Job(
        model=model,
        criterion=lambda output, batch: F.mse_loss(output, batch.targets),
        optimizer=Recipe(torch.optim.Adam, {"lr": lr, "weight_decay": 1e-5}),
        train=TensorDataset(pairs[held_out:], stars[held_out:]),
        evaluation=TensorDataset(pairs[:held_out], stars[:held_out]),
        metrics={"error": lambda output, batch: (output - batch.targets).abs()},
        global_batch=batch_size,
        epochs=epochs,
    )
