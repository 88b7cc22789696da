"""Random numbers that each row keeps, in whatever batch it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from samestep.reference import HeldRandomness
from samestep.reference.row_numbers import uniform_numbers

X = torch.rand(6, 4, 3, generator=torch.Generator().manual_seed(0)).double() + 0.1

DRAWN: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: torch.randn_like(x) + torch.randn(len(x), 1, 1),
    "uniform": lambda x: torch.rand(x.shape) + torch.empty_like(x).uniform_(2, 3),
    "mask": lambda x: (torch.rand(len(x), 4, 1) < 0.5) * x + torch.bernoulli(x.clamp(max=1)),
    "integers": lambda x: x * torch.randint(3, 9, (len(x), 1, 1)) + torch.empty(len(x), 1, 1).random_(5),
    "categories": lambda x: torch.multinomial(x[:, :, 0], 2)[..., None] + x[:, :2],
    "with replacement": lambda x: torch.multinomial(x[:, :, 0], 2, replacement=True)[..., None] + x[:, :2],
    "gumbel": lambda x: F.gumbel_softmax(x),
    "exponential": lambda x: torch.empty_like(x).exponential_(2.0),
    "gamma": lambda x: torch._standard_gamma(x),
    "poisson": lambda x: torch.poisson(5 * x),
    "Dirichlet": lambda x: torch.distributions.Dirichlet(x).sample(),
    "randomized relu": lambda x: F.rrelu(x - 0.5, training=True),
    "time first": lambda x: torch.randn(4, len(x), 3).transpose(0, 1),
    "places of a row": lambda x: torch.rand(len(x) * 4, 3).view(len(x), 4, 3),
}


@pytest.mark.parametrize("name", DRAWN)
def test_each_row_keeps_its_numbers(name: str) -> None:
    held_randomness = HeldRandomness()

    def compute(rows: int) -> None:
        held_randomness.rows = range(rows)
        torch.manual_seed(0)
        with held_randomness:
            DRAWN[name](X[:1].expand(rows, 4, 3).clone())

    held_randomness = HeldRandomness(row_dimensions=held_randomness.learn(compute))

    def drawn(rows: list[int]) -> Tensor:
        held_randomness.rows = [100 + row for row in rows]
        torch.manual_seed(0)
        with held_randomness:
            return DRAWN[name](X[rows])

    together = drawn([0, 1, 2, 3, 4, 5])
    assert torch.equal(together[[3, 1]], drawn([3, 1])) and torch.equal(together[5:], drawn([5]))
    assert held_randomness.keyed and not held_randomness.unknown
    assert name in ("categories", "with replacement") or not torch.equal(together[0], together[1])


def test_padding_changes_no_number() -> None:
    short, long = (uniform_numbers((2, size, 3), 0, [7, 9], 5, torch.device("cpu")) for size in (4, 6))
    assert torch.equal(short, long[:, :4])


def test_numbers_are_uniform() -> None:
    numbers = uniform_numbers((100, 1000), 0, range(100), 1, torch.device("cpu"))
    assert abs(float(numbers.mean()) - 0.5) < 0.005 and abs(float(numbers.var()) - 1 / 12) < 0.001
    assert float(numbers.min()) > 0 and float(numbers.max()) < 1
    assert abs(float(torch.corrcoef(numbers[:2])[0, 1])) < 0.1
