"""Recipe, LRSchedule and Phase: how a job's optimizers are built, and the one that takes the steps of all phases."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from samestep.errors import UserError
from samestep.job.function_checks import check_functions, check_optimizer, refuse_settings, shown

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


CHECKPOINTED = "_checkpoint_wrapped_module."  # what torch's activation checkpointing puts into names


@dataclass(frozen=True)
class InTurn(Recipe):
    """The recipe of the optimizer of a job with phases."""


def check_phases(phases: Any, model: Any, optimizer: Any) -> None:
    """Raises UserError for phases that cannot be taken in turn. optimizer: the job's own, which it then has not."""
    if not isinstance(phases, Sequence) or not all(isinstance(phase, Phase) for phase in phases):
        raise UserError(f"phases is {shown(phases)}; give a tuple of Phase(name, parameters, criterion, optimizer)")
    if optimizer is not None and not isinstance(optimizer, InTurn):
        raise UserError("optimizer and phases each say how the job is optimized; leave optimizer out")
    names = [phase.name for phase in phases]
    if len({*names}) < len(names):
        raise UserError(f"the phases are called {', '.join(names)}; give each a name of its own")
    for phase in phases:
        try:
            check_functions(model, phase.criterion)
            check_optimizer(phase.optimizer, isinstance(phase.optimizer, Recipe))
        except UserError as error:
            raise UserError(f"phase '{phase.name}': {error}") from None
        if phase.optimizer.needs_closure:
            raise UserError(
                f"phase '{phase.name}': {phase.optimizer.cls.__name__} computes the loss again in a closure, which a "
                "phase has not; use an optimizer that steps from gradients, such as AdamW"
            )


def parameters_of(phases: Sequence[Phase], model: nn.Module) -> list[list[nn.Parameter]]:
    """Returns the trained parameters of each phase, in the model's order. Frozen ones belong to none.

    Raises UserError for a trained parameter of no phase or of several, and for a phase without any.
    """
    names: dict[int, list[str]] = {}  # of each parameter; tied ones have several
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name.replace(CHECKPOINTED, ""))
    chosen = [_chosen(phase, model, names) for phase in phases]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for phase, ids in zip(phases, chosen):
        if not any(id(parameter) in ids for parameter in trained):
            modules = ", ".join(name for name, _ in model.named_children())
            raise UserError(
                f"phase '{phase.name}' has no parameters to train; name one of the model's modules ({modules}) in its "
                "`parameters`"
            )
    parameters: list[list[nn.Parameter]] = [[] for _ in phases]
    for parameter in trained:
        numbers = [number for number, ids in enumerate(chosen) if id(parameter) in ids]
        name = names[id(parameter)][0]
        if not numbers:
            known = ", ".join(phase.name for phase in phases)
            raise UserError(
                f"{name} is trained and belongs to no phase ({known}): name it or its module in the `parameters` of "
                "one, or freeze it with requires_grad_(False)"
            )
        if len(numbers) > 1:
            both = " and ".join(f"'{phases[number].name}'" for number in numbers)
            raise UserError(f"{name} belongs to the phases {both}; each parameter is trained by one")
        parameters[numbers[0]].append(parameter)
    return parameters


def _chosen(phase: Phase, model: nn.Module, names: dict[int, list[str]]) -> set[int]:
    """Returns the ids of the parameters that a phase names."""
    if callable(phase.parameters):
        return {id(parameter) for parameter in phase.parameters(model)}
    given = {phase.parameters} if isinstance(phase.parameters, str) else set(phase.parameters)
    return {
        number
        for number, parameter_names in names.items()
        if any(not given.isdisjoint(_paths(name)) for name in parameter_names)
    }


def _paths(name: str) -> Iterable[str]:
    """Returns a parameter's name, and the names of the modules that hold it."""
    return accumulate(name.split("."), "{}.{}".format)


def in_turn(phases: Sequence[Phase]) -> InTurn:
    """Returns the recipe of one optimizer with the parameter groups of all phases."""

    def groups(model: nn.Module) -> list[ParameterGroup]:
        return [
            {**group, "phase": number}
            for number, (phase, parameters) in enumerate(zip(phases, parameters_of(phases, model)))
            for group in _groups_of(phase, parameters, model)
        ]

    return InTurn(_optimizer_class([phase.optimizer for phase in phases]), {}, groups)


def _groups_of(phase: Phase, parameters: list[nn.Parameter], model: nn.Module) -> list[ParameterGroup]:
    """Returns a phase's parameter groups. Raises UserError where its Recipe's hold a parameter of another phase."""
    if phase.optimizer.groups is None:
        return [{"params": parameters}]
    built: list[Any] = list(phase.optimizer.groups(model))
    groups = built if all(isinstance(group, dict) for group in built) else [{"params": built}]
    ids = {id(parameter) for parameter in parameters}
    for group in groups:
        group["params"] = list(group["params"])
        if any(id(parameter) not in ids for parameter in group["params"] if parameter.requires_grad):
            raise UserError(
                f"the groups of phase '{phase.name}' hold a parameter that it does not train; groups(model) is given "
                "the whole model, and returns the groups of the phase's parameters"
            )
    return groups


def _optimizer_class(recipes: Sequence[Recipe]) -> type[Optimizer]:
    """Returns the class of the optimizer whose steps are in turn those of the recipes' optimizers.

    A class, not an instance: ZeroRedundancyOptimizer and Horovod build it again, from its parameter groups.
    """
    from torch.optim import Optimizer

    class Phases(Optimizer):
        """Takes the steps of those phases whose parameters require a gradient: of one, while a Run trains.

        groups: parameter groups, with the number of the phase under 'phase'. Some may have no parameters on this rank.
        """

        def __init__(self, groups: Iterable[ParameterGroup]) -> None:
            given = list(groups)
            self.optimizers: list[Optimizer] = []
            for number, recipe in enumerate(recipes):
                groups_of_phase = [
                    {**group, "params": list(group["params"])} for group in given if group["phase"] == number
                ]
                self.optimizers.append(recipe.cls(groups_of_phase, **recipe.settings))
            super().__init__([group for optimizer in self.optimizers for group in optimizer.param_groups], {})

        def step(self, closure: Any = None) -> Any:
            loss = None if closure is None else closure()
            for number, optimizer in enumerate(self.optimizers):
                groups = [group for group in self.param_groups if group["phase"] == number]
                if any(parameter.requires_grad for group in groups for parameter in group["params"]):
                    # Set in each step, as load_state_dict replaces them. One state holds those of all parameters.
                    optimizer.param_groups, optimizer.state = groups, self.state
                    optimizer.step()
            return loss

    return Phases
