"""Holds what is random in a training: each row keeps its random numbers, and batch statistics are fixed.

Dropout draws another mask on each rank, and BatchNorm normalises over a rank's own rows. Where every row has the random
numbers that it has in one process, and BatchNorm's statistics are fixed, N ranks and one process must agree; a
difference that remains is a mistake, as that of a mean over tokens which are masked at random.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.reference.row_numbers import CONSTANTS, KEYED, uniform_numbers

LIBRARIES = str(Path(torch.__file__).parent), str(Path(__file__).parent)
Place = tuple[str, int, str, int]  # file, line, operation and dimensions of a draw
RowDimensions = Mapping[Place, tuple[int, ...]]  # where the rows are in what is drawn there; (): nowhere
# What scales activations by a mask, and does nothing else with it: constants say as much, and need no rows.
MASKS = {"dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout", "feature_dropout"}
MASKS |= {"dropout_", "alpha_dropout_", "feature_dropout_", "feature_alpha_dropout_"}
MASKS |= {"lstm", "gru", "rnn_tanh", "rnn_relu", "multi_head_attention_forward", "scaled_dot_product_attention"}


class HeldRandomness:
    """A context in which each row keeps its random numbers, and BatchNorm uses its running statistics, unchanged.

    by_row: False: every random number is a constant of its distribution. row_dimensions: what `learn` has found.
    rows: a key for each row of the batch that is computed. holds_collate: whether the job's collate draws, so that the
    rows of a whole step are collated at once, and each replica is given its part.
    draws: whether random numbers were asked for. keyed: whether some of them were each row's. batch_statistics: whether
    a BatchNorm asked for its batch's; running_statistics: whether a layer wanted to average such statistics alone.
    unknown: the random operations that are neither each row's nor constant, because this module does not know them.
    not_finite: whether the loss of the untrained model is not finite with these numbers, as a mean over tokens is of
    which none is masked.
    """

    def __init__(self, *, by_row: bool = True, row_dimensions: RowDimensions | None = None) -> None:
        self.by_row, self.row_dimensions = by_row, row_dimensions or {}
        self.rows: Sequence[int] = ()
        self.holds_collate = False
        self.draws = self.keyed = self.batch_statistics = self.running_statistics = self.not_finite = False
        self.unknown: set[str] = set()
        self.drawn: list[tuple[Place, tuple[int, ...]]] | None = None  # what learn collects
        self.masks = 0  # how many functions of MASKS are being computed
        self._modes = _FixedStatistics(self), _HeldNumbers(self)

    def explains_non_finite(self, step: int) -> bool:
        """Whether a loss at `step` that is not finite comes from the numbers: no weights have moved at step 0, and
        with those that the job draws it is finite."""
        self.not_finite |= step == 0 and self.draws
        return self.not_finite

    def learn(self, compute: Callable[[int], Any]) -> RowDimensions:
        """Finds in which dimension the rows are, at each place that draws.

        compute: computes so many copies of one row, in this context.

        What has 2 and 3 times as many numbers for 2 and 3 rows holds the rows. A place that draws other numbers of
        times is left out.
        """
        drawn = []
        for rows in (2, 3):
            self.drawn = []
            compute(rows)
            drawn.append(self.drawn)
            self.drawn = None
        if [place for place, _ in drawn[0]] != [place for place, _ in drawn[1]]:
            return {}
        found: dict[Place, tuple[int, ...]] = {}
        for (place, two), (_, three) in zip(*drawn):
            found[place] = tuple(d for d, (a, b) in enumerate(zip(two, three)) if a != b and 3 * a == 2 * b)
        return found

    def numbers(self, shape: Sequence[int], name: str, device: torch.device) -> Tensor:
        """Returns uniform random numbers in (0, 1), float64, of which each row has its own."""
        place = _place(name, len(shape))
        if self.drawn is not None:
            self.drawn.append((place, tuple(shape)))
        self.keyed = True
        rows = len(self.rows)
        dimensions = self.row_dimensions.get(place, None)
        if dimensions is None:
            dimensions = tuple(d for d, size in enumerate(shape) if size == rows)
        where = next((d for d in dimensions if d < len(shape) and rows and shape[d] % rows == 0), None)
        key = int(torch.empty((), dtype=torch.int64).random_())  # of the generator, which a checkpoint restores
        return uniform_numbers(shape, where, self.rows, key, device)

    def __enter__(self) -> HeldRandomness:
        for mode in self._modes:
            mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)  # type: ignore[no-untyped-call]


def _place(name: str, dimensions: int) -> Place:
    """The line outside of torch that draws."""
    frame: Any = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, name, dimensions


class _FixedStatistics(TorchFunctionMode):
    """Calls batch_norm as in evaluation, and attention without dropout, which its CUDA kernels draw themselves."""

    def __init__(self, held_randomness: HeldRandomness) -> None:
        super().__init__()
        self.of = held_randomness

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func is functional.batch_norm:
            return self._batch_norm(*args, **named)
        if func is functional.instance_norm:
            return self._instance_norm(*args, **named)
        if func is functional.scaled_dot_product_attention and "dropout_p" in named:
            self.of.draws |= named["dropout_p"] > 0
            named["dropout_p"] = 0.0
        if getattr(func, "__name__", "") not in MASKS:
            return func(*args, **named)
        self.of.masks += 1
        try:
            return func(*args, **named)
        finally:
            self.of.masks -= 1

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

    def _instance_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Normalises each row by itself, as it does, and leaves the average over the batch's rows alone."""
        if use_input_stats and running_mean is not None:
            self.of.running_statistics = True
            running_mean = running_var = None
        return functional.instance_norm(
            input, running_mean, running_var, weight, bias, use_input_stats=use_input_stats, momentum=momentum, eps=eps
        )


class _HeldNumbers(TorchDispatchMode):
    """Fills what random operations return with each row's numbers, or with a constant of their distribution."""

    def __init__(self, held_randomness: HeldRandomness) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.of = held_randomness

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags or _draws_nothing(func, args, named):
            return func(*args, **named)
        self.of.draws = True
        name = func._schema.name.removeprefix("aten::")
        if self.of.by_row and not self.of.masks and name in KEYED:
            return KEYED[name](func, lambda like: self.of.numbers(like.shape, name, like.device), *args, **named)
        if name in CONSTANTS:
            return CONSTANTS[name](func, *args, **named)
        self.of.unknown.add(name)
        torch.manual_seed(0)  # at least the same numbers at each call
        return func(*args, **named)


def _draws_nothing(func: Any, args: Sequence[Any], named: Any) -> bool:
    """Whether this is a kernel of attention without dropout, which newer versions of torch mark as one that draws.

    With dropout it keeps its own: the backward pass would apply the dropout that the forward pass was asked for.
    """
    names = [argument.name for argument in func._schema.arguments]
    return "dropout_p" in names and dict(zip(names, args), **named).get("dropout_p", 0.0) == 0.0
