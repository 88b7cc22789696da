"""Which modules of a model are experts, that ranks can have some of each: found by trying them in one process.

Experts are modules of one list that are alike, and that one module, the router's, calls with some rows each. It must be
possible to compute the router's module twice: once to know the rows, and again with what the experts return for them.
Neither may depend on the other rows, nor draw random numbers in an expert.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import Refused
from samestep.job import Batch, Job
from samestep.message import Message, message
from samestep.rank.expert_exchange import TwoPasses, on_this_rank
from samestep.rank.job_errors import raising
from samestep.rank.plan_trial import is_close, tried, without_compiling
from samestep.rank.step import default_generator

ROWS = 4  # of the batch on which experts are looked for
SEED = 11
ROUNDING = 1e-5  # of the largest gradient
_close = partial(is_close, tolerance=1e-3)


@dataclass(frozen=True)
class ExpertList:
    """The experts of one router. router: the module whose forward calls them. names: of the experts. widths: the last
    sizes of their inputs and of their outputs."""

    router: str
    names: tuple[str, ...]
    widths: tuple[int, int]

    def owner(self, name: str, ranks: int) -> int:
        """Returns the rank that has an expert: each has as many that follow each other."""
        return self.names.index(name) * ranks // len(self.names)


@dataclass(frozen=True)
class ExpertPlan:
    """The lists of experts that ranks divide."""

    lists: tuple[ExpertList, ...]

    def said(self, model: nn.Module, ranks: int) -> Message:
        """Returns the plan for the user to read."""
        if not self.lists:
            return message("expert_replicas_of_one_rank")
        names = [name for experts in self.lists for name in experts.names]
        divided = sum(parameter.numel() for name in names for parameter in model.get_submodule(name).parameters())
        routers = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", experts.router) for experts in self.lists)
        return message(
            "expert_ranks_divide_the_model",
            ranks=ranks,
            experts=[*dict.fromkeys(len(experts.names) for experts in self.lists)],
            routers=[router or type(model).__name__ for router in routers],
            divided=divided,
            total=sum(parameter.numel() for parameter in model.parameters()),
        )


def expert_plan(job: Job, ranks: int, device: str = "cpu") -> ExpertPlan:
    """Returns which experts of the job's model `ranks` ranks divide. Raises Refused where there are none, or where they
    cannot be divided."""
    if ranks == 1:
        return ExpertPlan(())
    with torch.random.fork_rng():
        trial = tried(job, ROWS, device, partial(Trial, job, device))
        lists = [experts for experts in trial.candidates() if trial.are_apart(experts)]
        if not lists:
            raise Refused(message("model_without_experts"))
        for experts in lists:
            if len(experts.names) % ranks:
                fields = {"router": experts.router, "experts": len(experts.names), "ranks": ranks}
                raise Refused(message("experts_do_not_divide", **fields))
            trial.check(experts)
        trial.check_together(lists)
    return ExpertPlan(tuple(lists))


@dataclass
class Call:
    """One call of a module. random: the generator's state before it, and random_after. inner: the calls inside."""

    name: str
    arguments: tuple[Any, Any]
    random: Tensor
    output: Any = None
    random_after: Tensor | None = None
    inner: list[Call] = field(default_factory=list)


class Trial:
    """A model and a few rows, on which its modules are tried. calls: of all modules, in the order of the forward
    pass."""

    def __init__(self, job: Job, device: str, batch: Batch) -> None:
        self.model = job.model().to(device).train()
        self._job, self._batch = job.of_phases()[0], batch
        self._generator = default_generator(device)
        self.calls: list[Call] = []
        self._modules = dict(self.model.named_modules())
        unfinished: list[Call] = []

        def begin(name: str) -> Callable[[nn.Module, Any, Any], None]:
            def hook(module: nn.Module, arguments: Any, named: Any) -> None:
                call = Call(name, (arguments, named), self._generator.get_state())
                if unfinished:
                    unfinished[-1].inner.append(call)
                unfinished.append(call)
                self.calls.append(call)

            return hook

        def end(module: nn.Module, arguments: Any, output: Any) -> None:
            call = unfinished.pop()
            call.output, call.random_after = output, self._generator.get_state()

        with ExitStack() as hooks:
            for name, module in self._modules.items():
                hooks.callback(module.register_forward_pre_hook(begin(name), with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(end).remove)
            self._whole = self._loss_and_gradients()

    def _loss_and_gradients(self) -> dict[str, Any]:
        """Returns the loss, and the gradient of each parameter or None."""
        self.model.zero_grad()
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        with without_compiling():
            self._generator.manual_seed(SEED)
            rows = self._batch.micro_batch.rows
            output = raising("forward", lambda: self._job.forward(self.model, self._batch), rows)
            loss = raising("criterion", lambda: self._job.criterion(output, self._batch), rows)
        if loss.requires_grad:
            loss.backward()
        for buffer, before in buffers:
            buffer.copy_(before)
        gradients = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        return {"": loss.detach(), **gradients}

    def candidates(self) -> Iterator[ExpertList]:
        """Yields the lists of modules that are alike, and that one module calls at most once in each of its calls."""
        for name, module in self._modules.items():
            if not isinstance(module, nn.ModuleList | nn.ModuleDict) or len(module) < 2:
                continue
            names = tuple(f"{name}.{key}".lstrip(".") for key, _ in module.named_children())
            alike = len({_shape_of(self._modules[expert]) for expert in names}) == 1
            called = [(call, inner) for call in self.calls for inner in call.inner if inner.name in names]
            if not (alike and called and all(_takes_rows(inner) for _, inner in called)):
                continue
            routers = {call.name for call, _ in called}
            widths = {(inner.arguments[0][0].shape[-1], inner.output.shape[-1]) for _, inner in called}
            if len(routers) == len(widths) == 1 and len(names) == len(module):
                yield ExpertList(routers.pop(), names, widths.pop())

    def are_apart(self, experts: ExpertList) -> bool:
        """Returns whether no expert's input depends on another expert's output, and each gives its rows' outputs,
        whichever rows are beside them."""
        some = False
        for call in (call for call in self.calls if call.name == experts.router):
            inner = [inner for inner in call.inner if inner.name in experts.names]
            if len({found.name for found in inner}) < len(inner):
                return False
            for found in inner:
                rows = found.arguments[0][0].detach()
                some |= rows.numel() > 0
                if not self._gives_rows_alone(found, rows):
                    return False
            if inner and not self._has_same_inputs(call, experts, inner):
                return False
        return some

    def _gives_rows_alone(self, call: Call, rows: Tensor) -> bool:
        """Returns whether an expert gives every second row's output from these rows alone. An expert with dropout is
        tried without."""
        expert, random = self._modules[call.name], not torch.equal(call.random, call.random_after)  # type: ignore[arg-type]
        if not rows.numel():
            return True
        try:
            with torch.no_grad(), torch.random.fork_rng():
                expert.train(not random)
                whole, some = (expert(part).flatten(0, -2) for part in (rows, rows.flatten(0, -2)[::2]))
        except Exception:  # a shape that it does not take
            return False
        finally:
            expert.train()
        return _close(whole[::2], some)

    def _has_same_inputs(self, call: Call, experts: ExpertList, inner: Sequence[Call]) -> bool:
        """Returns whether a router gives its experts the same rows where they all return zeros."""
        passes = self._two_passes(experts)
        self._generator.set_state(call.random)
        arguments, named = call.arguments
        try:
            with torch.no_grad(), without_compiling(), passes.installed():
                rows = passes.rows_of(*arguments, **named)
        except Exception:  # a value that zeros do not allow
            return False
        given = {found.name: found.arguments[0][0] for found in inner}
        return given.keys() == rows.keys() and all(_close(given[name], rows[name]) for name in given)

    def _two_passes(self, experts: ExpertList) -> TwoPasses:
        modules = {name: self._modules[name] for name in experts.names}
        return TwoPasses(self._modules[experts.router], modules, width=experts.widths[1], compute=on_this_rank)

    def check(self, experts: ExpertList) -> None:
        """Raises Refused for experts that draw random numbers, or have buffers or shared weights."""
        if any(
            not torch.equal(call.random, call.random_after)  # type: ignore[arg-type]
            for call in self.calls
            if call.name in experts.names
        ):
            raise Refused(message("random_numbers_inside_of_experts", router=experts.router))
        modules = {name: self._modules[name] for name in experts.names}
        inside = {id(module) for expert in modules.values() for module in expert.modules()}
        outside = [module for module in self.model.modules() if id(module) not in inside]
        held = {id(parameter) for module in outside for parameter in module.parameters(recurse=False)}
        for name, expert in modules.items():
            if any(True for _ in expert.buffers()):
                raise Refused(message("experts_with_buffers", expert=name))
            if any(id(parameter) in held for parameter in expert.parameters()):
                raise Refused(message("experts_share_weights", expert=name))
            held |= {id(parameter) for parameter in expert.parameters()}

    def check_together(self, lists: Sequence[ExpertList]) -> None:
        """Raises Refused where the loss or a gradient is another one when routers are computed twice."""
        with ExitStack() as stack:
            for experts in lists:
                stack.enter_context(self._two_passes(experts).installed())
            twice = self._loss_and_gradients()
        sizes = [float(value.detach().abs().max()) for value in self._whole.values() if value is not None]
        # A gradient that is zero but for rounding, as of a bias before a normalisation, has no size to compare with.
        rounding = ROUNDING * max(sizes)
        wrong = next((n for n, value in self._whole.items() if not _agree(value, twice[n], rounding)), None)
        if wrong is not None:
            what = message("gradient_named", tensor=wrong) if wrong else message("loss_named")
            raise Refused(message("router_is_not_computed_twice", router=lists[0].router, what=what))


def _agree(expected: Any, given: Any, rounding: float) -> bool:
    """Returns whether two values are equal up to rounding. rounding: an absolute difference that is none."""
    if _close(expected, given):
        return True
    both = isinstance(expected, Tensor) and isinstance(given, Tensor)
    return both and float((expected - given).abs().max()) <= rounding


def _shape_of(module: nn.Module) -> str:
    """Returns a text that is the same for modules that are alike."""
    return str(
        (type(module), [(name, parameter.shape, parameter.dtype) for name, parameter in module.named_parameters()])
    )


def _takes_rows(call: Call) -> bool:
    """Returns whether a module was called with one tensor, and returned as many rows."""
    (arguments, named), output = call.arguments, call.output
    if named or len(arguments) != 1 or not (isinstance(arguments[0], Tensor) and isinstance(output, Tensor)):
        return False
    return arguments[0].dim() > 1 and arguments[0].shape[:-1] == output.shape[:-1]
