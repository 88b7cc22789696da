"""The parts of a training beside its loop: what guards, reports, evaluates, saves or observes it.

A Run tells each of its parts of each moment of a step, in the order in which it lists them. A part does its work in the
moments that concern it, and nothing in the others. One that is not wanted is not in the list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.amp import GradScaler

from samestep.data.schedule import Schedule
from samestep.job import Batch, MicroBatch
from samestep.rank.meter import Meter
from samestep.rank.step import CarriedState, StepCount
from samestep.rank.weights import Ema
from samestep.world import World


class SteppedByEvaluations(Protocol):
    """A learning-rate schedule that evaluations step."""

    def step(self, means: Mapping[str, float]) -> None: ...


class Training(Protocol):
    """The interface of a training, which is a samestep.training.Run, for its parts.

    model, optimizer: None until they are registered. stateful: name -> what else has a state dict; None: the training
    has no such part. left_out: whether the latest step has left the weights as they were.
    """

    world: World
    steps: int
    schedule: Schedule
    count: StepCount
    meter: Meter
    micro_batch: MicroBatch | None
    model: Any
    optimizer: Any
    scaler: GradScaler | None
    carried: CarriedState | None
    stateful: dict[str, Any]
    ema: Ema | None
    left_out: bool

    @property
    def evaluation_schedule(self) -> SteppedByEvaluations | None: ...


class Part:
    """A part of one training on this rank. training: that of the Run which has the part."""

    training: Training

    def begin(self) -> None:
        """The model and the optimizer are ready, and hold what a checkpoint has."""

    def step_begins(self) -> None:
        """The first step of all begins, or the one before has ended with its evaluation and its checkpoint."""

    def drawn(self, step: int) -> None:
        """The first batch of a step has come from the loader."""

    def averages_begin(self) -> None:
        """The engine has made the parameters its own, and the averages of the weights begin."""

    def forward(self, micro_batch: MicroBatch) -> None:
        """A forward pass begins; its phase is active."""

    def loss(self, batch: Batch, loss: Tensor) -> None:
        """A batch's mean loss is computed."""

    def stepped(self) -> None:
        """The optimizer has made its step, which is not counted yet."""

    def counted(self) -> None:
        """The step is counted, and taken into the averages of the weights."""

    def stopped(self) -> None:
        """The training ends before its last step, as it was asked to."""

    def end(self) -> None:
        """The last step is done, and the model has its averaged weights."""
