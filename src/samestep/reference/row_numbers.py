"""The random numbers of the comparison with one process: each row's own, or constants of their distribution.

A row's numbers are hashed from its key and from their place in the row, so that they are the same beside any other rows
and whatever length a batch is padded to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Numbers = Callable[[Tensor], Tensor]  # a tensor -> uniform numbers of its shape, float64

# Odd 64-bit constants of splitmix64, as signed integers: torch multiplies modulo 2**64.
FIRST, SECOND, STEP = -4658895280553007687, -7723592293110705685, -7046029254386353131


def uniform_numbers(
    shape: Sequence[int], where: int | None, rows: Sequence[int], key: int, device: torch.device
) -> Tensor:
    """Returns numbers in (0, 1) of `shape`, float64. where: the dimension of the rows, each of which may have several
    places there, one after the other; None: all rows share the numbers. rows: the key of each. key: of this draw."""
    mixed = torch.full([1] * len(shape), key, dtype=torch.int64, device=device)
    for dimension, size in enumerate(shape):
        place = torch.arange(size, dtype=torch.int64, device=device)
        if dimension == where:
            of_row = size // len(rows)
            keys = torch.tensor(list(rows), dtype=torch.int64, device=device)
            place = _mix(keys.repeat_interleave(of_row)) + place % of_row
        mixed = _mix(mixed + place.view([-1 if d == dimension else 1 for d in range(len(shape))]) * STEP)
    mixed = _mix(mixed)
    return (((mixed >> 11) & ((1 << 53) - 1)).double() + 0.5) / (1 << 53)


def _mix(numbers: Tensor) -> Tensor:
    numbers = (numbers ^ ((numbers >> 30) & ((1 << 34) - 1))) * FIRST
    numbers = (numbers ^ ((numbers >> 27) & ((1 << 37) - 1))) * SECOND
    return numbers ^ ((numbers >> 31) & ((1 << 33) - 1))


def _empty(func: Any, *args: Any, **named: Any) -> Tensor:
    """What a function returns, whose numbers are replaced. The generator stays as it was."""
    state = torch.get_rng_state()
    drawn: Tensor = func(*args, **named)
    torch.set_rng_state(state)
    return drawn


def _factory(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def drawn(func: Any, numbers: Numbers, *args: Any, **named: Any) -> Tensor:
        empty = _empty(func, *args, **named)
        return empty.copy_(change(numbers(empty)))

    return drawn


def _normal_of(uniform: Tensor) -> Tensor:
    normal: Tensor = torch.special.ndtri(uniform)
    return normal


def _in_place(change: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """change: (uniform numbers, the operation's numbers) -> what is drawn."""

    def drawn(func: Any, numbers: Numbers, tensor: Tensor, *args: Any, generator: Any = None, **named: Any) -> Tensor:
        return tensor.copy_(change(numbers(tensor), *args, **named))

    return drawn


def _uniform_between(uniform: Tensor, low: float = 0.0, high: float = 1.0, **named: float) -> Tensor:
    low, high = named.get("from", low), named.get("to", high)
    return low + (high - low) * uniform


def _new(change: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """change: (uniform numbers, the tensor, the operation's numbers) -> what is drawn, of the tensor's dtype."""

    def drawn(func: Any, numbers: Numbers, tensor: Tensor, *args: Any, generator: Any = None, **named: Any) -> Tensor:
        return change(numbers(tensor), tensor, *args, **named).to(tensor.dtype)

    return drawn


def _normal(func: Any, numbers: Numbers, mean: Any, std: Any = 1.0, *args: Any, **named: Any) -> Tensor:
    empty = _empty(func, mean, std, *args, **named)
    return empty.copy_(_normal_of(numbers(empty)) * torch.as_tensor(std) + mean)


def _integers(func: Any, numbers: Numbers, *args: Any, **named: Any) -> Tensor:
    """randint and randint_like: (high, …), or (low, high, …), after the tensor of randint_like."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args)) | named
    empty, low = _empty(func, *args, **named), given.get("low", 0)
    return empty.copy_((low + (given["high"] - low) * numbers(empty)).floor())


def _integers_in_place(uniform: Tensor, low: int | None = None, high: int | None = None, **named: Any) -> Tensor:
    low, high = named.get("from", low), named.get("to", high)
    if high is None:
        low, high = 0, 2**24 if low is None else low
    return ((low or 0) + (high - (low or 0)) * uniform).floor()


def _chosen(
    func: Any, numbers: Numbers, weights: Tensor, samples: int, replacement: bool = False, *, generator: Any = None
) -> Tensor:
    """multinomial: without replacement those that a race of exponential times ends with first."""
    if replacement:
        ends = weights.double().cumsum(-1)
        drawn = numbers(weights.new_empty([*weights.shape[:-1], samples])) * ends[..., -1:]
        return torch.searchsorted(ends, drawn).clamp(max=weights.shape[-1] - 1)
    times = -torch.log(numbers(weights)) / weights.double()
    return times.topk(samples, dim=-1, largest=False).indices


def _dirichlet(uniform: Tensor, alpha: Tensor) -> Tensor:
    parts = alpha.double() * (0.5 + uniform)
    return parts / parts.sum(-1, keepdim=True)


def _leaky(
    func: Any,
    numbers: Numbers,
    tensor: Tensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Tensor:
    slopes = lower + (upper - lower) * numbers(tensor)
    noise.copy_(torch.where(tensor <= 0, slopes, 1.0) if training else noise)
    return tensor * noise if training else torch.where(tensor <= 0, tensor * (lower + upper) / 2, tensor)


# Of a gamma, Poisson, binomial or Dirichlet distribution: other numbers, around their mean, which each row keeps too.
KEYED: dict[str, Callable[..., Any]] = {
    "rand": _factory(lambda uniform: uniform),
    "rand_like": _factory(lambda uniform: uniform),
    "randn": _factory(_normal_of),
    "randn_like": _factory(_normal_of),
    "normal": _normal,
    "randint": _integers,
    "randint_like": _integers,
    "bernoulli": _new(lambda uniform, tensor, p=None: uniform < (tensor if p is None else p)),
    "bernoulli_": _in_place(lambda uniform, p=0.5: (uniform < p).double()),
    "uniform_": _in_place(_uniform_between),
    "normal_": _in_place(lambda uniform, mean=0.0, std=1.0: mean + std * _normal_of(uniform)),
    "exponential_": _in_place(lambda uniform, lambd=1.0: -torch.log(uniform) / lambd),
    "log_normal_": _in_place(lambda uniform, mean=1.0, std=2.0: torch.exp(mean + std * _normal_of(uniform))),
    "cauchy_": _in_place(lambda uniform, median=0.0, sigma=1.0: median + sigma * torch.tan(3.14159 * (uniform - 0.5))),
    "geometric_": _in_place(
        lambda uniform, p: (torch.log(uniform) / torch.log1p(torch.tensor(-p).double())).ceil().clamp(min=1)
    ),
    "random_": _in_place(_integers_in_place),
    "multinomial": _chosen,
    "poisson": _new(lambda uniform, rate: (rate * 2 * uniform).floor()),
    "binomial": _new(lambda uniform, count, prob: (count * prob * (0.5 + uniform)).floor().minimum(count)),
    "_standard_gamma": _new(lambda uniform, alpha: alpha * (0.5 + uniform)),
    "_sample_dirichlet": _new(_dirichlet),
    "rrelu_with_noise": _leaky,
}


def _filled(value: float) -> Callable[..., Any]:
    return lambda func, *args, **named: func(*args, **named).fill_(value)


def _uniform(func: Any, tensor: Tensor, low: float = 0.0, high: float = 1.0, **_: Any) -> Tensor:
    return tensor.fill_((low + high) / 2)


def _normal_in_place(func: Any, tensor: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    return tensor.fill_(mean + 0.5 * std)


def _constant_normal(func: Any, mean: Any, std: Any = 1.0, *args: Any, **named: Any) -> Tensor:
    drawn: Tensor = func(mean, std, *args, **named)
    return drawn.zero_().add_(mean).add_(torch.as_tensor(std) * 0.5)


def _likeliest(func: Any, weights: Tensor, samples: int, *args: Any, **named: Any) -> Tensor:
    """The likeliest categories of each row."""
    likeliest = weights.argsort(dim=-1, descending=True)
    chosen: Tensor = likeliest[..., torch.arange(samples, device=weights.device) % weights.shape[-1]]
    return chosen


def _native_dropout(func: Any, tensor: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    scale = 1 / (1 - p) if train and p < 1 else 1.0
    return tensor * scale, torch.ones_like(tensor, dtype=torch.bool)


def _lowest(func: Any, *args: Any, **named: Any) -> Tensor:
    """randint's lowest number: its first argument is `low` where it has two."""
    low = args[0] if "low" in [argument.name for argument in func._schema.arguments] else 0
    drawn: Tensor = func(*args, **named)
    return drawn.fill_(low)


CONSTANTS: dict[str, Callable[..., Any]] = {
    "bernoulli": _filled(1),
    "bernoulli_": _filled(1),
    "rand": _filled(0.5),
    "rand_like": _filled(0.5),
    "randn": _filled(0.5),
    "randn_like": _filled(0.5),
    "exponential_": _filled(1),
    "uniform_": _uniform,
    "normal": _constant_normal,
    "normal_": _normal_in_place,
    "native_dropout": _native_dropout,
    "multinomial": _likeliest,
    "randint": _lowest,
    "randint_like": _filled(0),
    "random_": lambda func, tensor, *args, **named: tensor.fill_(args[0] if len(args) > 1 else 0),
    "randperm": lambda func, n, **named: torch.arange(n, device=named.get("device")),
    "poisson": lambda func, rate, *_, **named: rate.floor(),
    "binomial": lambda func, count, prob, *_, **named: (count * prob).floor(),
    "_standard_gamma": lambda func, alpha, *_, **named: alpha.clone(),
    "_sample_dirichlet": lambda func, alpha, *_, **named: alpha / alpha.sum(-1, keepdim=True),
}
