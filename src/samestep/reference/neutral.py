"""Neutral: computes without random numbers and batch statistics, by which N ranks differ from one process.

Dropout draws another mask on each rank, and BatchNorm normalises over a rank's own rows. With every random number a
constant and BatchNorm's statistics fixed, N ranks and one process must agree; a difference that remains is a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Neutral:
    """A context in which random numbers are constants and BatchNorm uses its running statistics, unchanged.

    draws: whether random numbers were asked for. batch_statistics: whether a BatchNorm asked for its batch's.
    unknown: the random operations that are not made constant, because this module does not know them.
    not_finite: whether the loss of the untrained model is not finite with these constants, as a mean over tokens is of
    which none is masked.
    """

    def __init__(self) -> None:
        self.draws = self.batch_statistics = self.not_finite = False
        self.unknown: set[str] = set()
        self._modes = _FixedStatistics(self), _ConstantNumbers(self)

    def explains_non_finite(self, step: int) -> bool:
        """Whether a loss at `step` that is not finite comes from the constants: no weights have moved at step 0, and
        with the numbers that the job draws it is finite."""
        self.not_finite |= step == 0 and self.draws
        return self.not_finite

    def __enter__(self) -> Neutral:
        for mode in self._modes:
            mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)  # type: ignore[no-untyped-call]


class _FixedStatistics(TorchFunctionMode):
    """Calls batch_norm as in evaluation, and attention without dropout, which its CUDA kernels draw themselves."""

    def __init__(self, neutral: Neutral) -> None:
        super().__init__()
        self.of = neutral

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func is functional.batch_norm:
            return self._batch_norm(*args, **named)
        if func is functional.scaled_dot_product_attention and "dropout_p" in named:
            self.of.draws |= named["dropout_p"] > 0
            named["dropout_p"] = 0.0
        return func(*args, **named)

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        self.of.batch_statistics |= training
        mean = input.new_zeros(input.shape[1]) if running_mean is None else running_mean
        variance = input.new_ones(input.shape[1]) if running_var is None else running_var
        return functional.batch_norm(input, mean, variance, weight, bias, training=False, momentum=momentum, eps=eps)


class _ConstantNumbers(TorchDispatchMode):
    """Fills what random operations return with a constant of their distribution, the same for every row."""

    def __init__(self, neutral: Neutral) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.of = neutral

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags or _draws_nothing(func, args, named):
            return func(*args, **named)
        self.of.draws = True
        name = func._schema.name.removeprefix("aten::")
        if constant := CONSTANTS.get(name):
            return constant(func, *args, **named)
        self.of.unknown.add(name)
        torch.manual_seed(0)  # at least the same numbers at each call
        return func(*args, **named)


def _draws_nothing(func: Any, args: Sequence[Any], named: Any) -> bool:
    """Whether this is a kernel of attention without dropout, which newer versions of torch mark as one that draws.

    With dropout it keeps its own: the backward pass would apply the dropout that the forward pass was asked for.
    """
    names = [argument.name for argument in func._schema.arguments]
    return "dropout_p" in names and dict(zip(names, args), **named).get("dropout_p", 0.0) == 0.0


def _filled(value: float) -> Callable[..., Any]:
    return lambda func, *args, **named: func(*args, **named).fill_(value)


def _uniform(func: Any, tensor: Tensor, low: float = 0.0, high: float = 1.0, **_: Any) -> Tensor:
    return tensor.fill_((low + high) / 2)


def _normal_in_place(func: Any, tensor: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    return tensor.fill_(mean + 0.5 * std)


def _normal(func: Any, mean: Any, std: Any = 1.0, *args: Any, **named: Any) -> Tensor:
    drawn: Tensor = func(mean, std, *args, **named)
    return drawn.zero_().add_(mean).add_(torch.as_tensor(std) * 0.5)


def _multinomial(func: Any, weights: Tensor, samples: int, *args: Any, **named: Any) -> Tensor:
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
    "normal": _normal,
    "normal_": _normal_in_place,
    "native_dropout": _native_dropout,
    "multinomial": _multinomial,
    "randint": _lowest,
    "randint_like": _filled(0),
    "random_": lambda func, tensor, *args, **named: tensor.fill_(args[0] if len(args) > 1 else 0),
    "randperm": lambda func, n, **named: torch.arange(n, device=named.get("device")),
}
