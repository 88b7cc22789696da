"""Recipe, LRSchedule and Phase: how the optimizers of a job are built, and when their rates move."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from samestep.job.other_names import refuse_settings

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


ParameterGroup = dict[str, Any]  # as torch.optim takes it


@dataclass(frozen=True)
class Recipe:
    """How to build the optimizer, which an engine that shards parameters does after sharding.

    cls: for example torch.optim.AdamW. settings: its keyword arguments, `lr` among them.
    groups: (model) -> torch's parameter groups (a list of dicts); None: one group of all parameters.
    """

    cls: type[Optimizer]
    settings: Mapping[str, Any] = field(default_factory=dict)
    groups: Callable[[nn.Module], list[ParameterGroup]] | None = None

    def __new__(cls, /, *values: Any, **named: Any) -> Recipe:
        refuse_settings(cls, values, named, "{cls}, {{{quoted}}}")
        return super().__new__(cls)

    def build(self, model: nn.Module) -> Optimizer:
        """Builds the optimizer of `model`: the plain module, not a wrapper that renames its parameters."""
        parameters = self.groups(model) if self.groups else model.parameters()
        return self.cls(parameters, **self.settings)

    @property
    def needs_closure(self) -> bool:
        """Whether the optimizer's step demands a closure that computes the loss again, as LBFGS's does."""
        closure = inspect.signature(self.cls.step).parameters.get("closure")
        return closure is not None and closure.default is inspect.Parameter.empty


@dataclass(frozen=True)
class LRSchedule:
    """The learning-rate schedule: `make(optimizer)` returns a torch scheduler, stepped after every step or epoch.

    Of a job with phases every='step' means: after all phases have taken theirs.
    every='evaluation': stepped after every evaluation; ReduceLROnPlateau, which needs a metric, with that of the name
    `metric`.
    """

    make: Callable[[Optimizer], LRScheduler]
    every: Literal["step", "epoch", "evaluation"] = "step"
    metric: str = "loss"

    def __new__(cls, /, *values: Any, **named: Any) -> LRSchedule:
        refuse_settings(cls, values, named, "lambda optimizer: {cls}(optimizer, {named})")
        return super().__new__(cls)


@dataclass(frozen=True)
class Phase:
    """One of several optimizers of a job, such as the discriminator's of a GAN: see Job.phases.

    parameters: what the phase trains: the name of a module or parameter, such as 'generator', several names, or
        (model) -> parameters.
    criterion: (output, batch) -> scalar, the mean over the rows of the batch.
    forward: (model, batch) -> the output that the criterion is given; None: Job.forward.
    """

    name: str
    parameters: str | Sequence[str] | Callable[[nn.Module], Iterable[nn.Parameter]]
    criterion: Callable[[Any, Any], Tensor]
    optimizer: Recipe
    forward: Callable[[nn.Module, Any], Any] | None = None
