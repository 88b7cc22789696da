"""What the reference returns, as plain values and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

State = Mapping[str, Tensor]  # name -> tensor


@dataclass(frozen=True)
class MicroBatch:
    """One replica's part of one micro-batch. indices: of its rows. weight: theirs in the step's mean. digests: of each
    row's tensors, none in a run with noise. loss: their mean, 0 without rows."""

    epoch: int
    step: int
    micro: int
    indices: list[int]
    weight: float
    digests: list[str]
    loss: float


@dataclass(frozen=True)
class Evaluation:
    """The reference's evaluation.

    rows: of the evaluation dataset; weight: theirs in the loss. sums: of the loss times the weight, and of each metric.
    whole: the metrics with update and compute, whose 'sum' is their value. unsteady: the sums that depend on how many
    rows are evaluated at once, or on random numbers.
    """

    rows: int
    weight: float
    sums: Mapping[str, float]
    unsteady: tuple[str, ...]
    whole: tuple[str, ...]


@dataclass(frozen=True)
class TrainingResult:
    """A whole training.

    micro_batches: [replica][micro-batch in order]. later: epoch -> [micro-batch][replica] -> the rows of its first
    step. rates: [step][parameter group], the learning rates. norms: of each step's gradient, before clipping. draws:
    whether the model draws random numbers. state: the model's state dict after the last step. buffers: [replica].
    own: samples of replica 0's own gradient of the first step. before_last, own_before_last: of the mean over the
    replicas and of replica 0's, without the first step's last micro-batch; empty where there is but one. See
    first_gradient.py.
    """

    micro_batches: list[list[MicroBatch]]
    later: Mapping[int, list[list[list[int]]]]
    rates: list[list[float]]
    norms: list[float]
    draws: bool
    state: State
    buffers: list[State]
    own: State
    before_last: State
    own_before_last: State
    evaluation: Evaluation | None


@dataclass(frozen=True)
class Separation:
    """The losses of a few rows in batches of different rows: see separation.py.

    weights: of each row. whole: of all rows; again: the same, by the model that has just computed it. alone: of each
    row. pairs: of the first row with each other one. halves: of the first and the second half of the rows.
    output_gap: how far a row's output depends on the other rows, relative; None where it cannot be compared.
    moved: buffers and attributes that a forward pass changes. unknown: random operations that are not held constant.
    collate_draws: whether the job's collate draws random numbers.
    """

    weights: list[float]
    whole: float
    again: float
    alone: list[float]
    pairs: list[float]
    halves: list[float]
    output_gap: float | None
    moved: list[str]
    unknown: list[str]
    collate_draws: bool
