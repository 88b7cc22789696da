"""Which modules of a model are experts, that ranks can have some of each: found by trying them in one process.

Experts are modules of one list that are alike, and that one module, the router's, calls with some rows each. It must be
possible to compute the router's module twice: once to know the rows, and again with what the experts return for them.
Neither may depend on the other rows, nor draw random numbers in an expert.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import Refused, UserError
from samestep.job import Batch, Job
from samestep.message import Message, message
from samestep.rank.expert_exchange import Exchange, TwoPasses
from samestep.rank.job_errors import raising
from samestep.rank.plan_trial import TakenTensors, is_close, tried, without_compiling
from samestep.rank.step import default_generator, keep_state
from samestep.rank.threaded_group import alike_on_ranks
from samestep.world.foreign_code import error_line

ROWS = 4  # of the batch on which experts are looked for
SEED = 11
CLOSE = 1e-3  # relative
ULPS = 16  # of a lower precision
ROUNDING = 1e-5  # of the largest gradient
BUFFER = "buffer "


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


@alike_on_ranks
def expert_plan(job: Job, ranks: int, device: str = "cpu") -> ExpertPlan:
    """Returns which experts of the job's model `ranks` ranks divide. Raises Refused where there are none, or where they
    cannot be divided."""
    if ranks == 1:
        return ExpertPlan(())
    with torch.random.fork_rng():
        trial = tried(job, ROWS, device, partial(Trial, job, device))
        found = [experts for experts in trial.candidates() if trial.are_apart(experts)]
        if not found:
            raise Refused(message("model_without_experts"))
        lists = [experts for experts in found if len(experts.names) % ranks == 0]
        if not lists:
            fields = {"router": found[0].router, "experts": len(found[0].names), "ranks": ranks}
            raise Refused(message("experts_do_not_divide", **fields))
        # What is inside of an expert is computed by the rank that has that one.
        outer = tuple(f"{name}." for experts in lists for name in experts.names)
        lists = [experts for experts in lists if not f"{experts.router}.".startswith(outer)]
        for experts in lists:
            trial.check(experts)
        trial.check_together(lists)
    return ExpertPlan(tuple(lists))


@dataclass
class Call:
    """One call of a module. random: the generator's state before it, and random_after. autocast: returns a context that
    is in autocast as the call is. inner: the calls inside."""

    name: str
    arguments: tuple[Any, Any]
    random: Tensor
    autocast: Callable[[], AbstractContextManager[Any]]
    output: Any = None
    random_after: Tensor | None = None
    inner: list[Call] = field(default_factory=list)


class Trial:
    """A model and a few rows, on which its modules are tried. calls: of all modules, in the order of the forward
    pass."""

    def __init__(self, job: Job, device: str, batch: Batch) -> None:
        self.model = job.model().to(device).train()
        self._job, self._batch, self._device = job.of_phases()[0], batch, device
        self._generator = default_generator(device)
        self.calls: list[Call] = []
        self._modules = dict(self.model.named_modules())
        unfinished: list[Call] = []

        def begin(name: str) -> Callable[[nn.Module, Any, Any], None]:
            def hook(module: nn.Module, arguments: Any, named: Any) -> None:
                call = Call(name, (arguments, named), self._generator.get_state(), _autocast_of(device))
                if unfinished:
                    unfinished[-1].inner.append(call)
                unfinished.append(call)
                self.calls.append(call)

            return hook

        def end(module: nn.Module, arguments: Any, output: Any) -> None:
            call = unfinished.pop()
            call.output, call.random_after = output, self._generator.get_state()

        self._hooked = {name for name, module in self._modules.items() if _has_hooks(module)}
        self._reads = _Reads(self.model, unfinished)
        with ExitStack() as hooks:
            for name, module in self._modules.items():
                hooks.callback(module.register_forward_pre_hook(begin(name), with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(end).remove)
            self._whole = self._loss_and_gradients(self._reads)

    def _loss_and_gradients(self, reads: _Reads | None = None) -> dict[str, Any]:
        """Returns the loss, the gradient of each parameter or None, and what each buffer has become."""
        self.model.zero_grad()
        restore = keep_state(self.model)
        with without_compiling(), reads or nullcontext():
            self._generator.manual_seed(SEED)
            rows = self._batch.micro_batch.rows
            output = raising("forward", lambda: self._job.forward(self.model, self._batch), rows)
            loss = raising("criterion", lambda: self._job.criterion(output, self._batch), rows)
        if loss.requires_grad:
            loss.backward()
        buffers = {f"{BUFFER}{name}": buffer.detach().clone() for name, buffer in self.model.named_buffers()}
        restore()
        gradients = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        return {"": loss.detach(), **gradients, **buffers}

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
        restore = keep_state(expert)
        try:
            with torch.no_grad(), torch.random.fork_rng(), call.autocast():
                expert.train(not random)
                whole, some = (expert(part).flatten(0, -2) for part in (rows, rows.flatten(0, -2)[::2]))
        except Exception:  # a shape that it does not take
            return False
        finally:
            expert.train()
            restore()
        return _close(whole[::2], some)

    def _has_same_inputs(self, call: Call, experts: ExpertList, inner: Sequence[Call]) -> bool:
        """Returns whether a router gives its experts the same rows where they all return zeros."""
        passes, restore = self._two_passes(experts), keep_state(self._modules[experts.router])
        self._generator.set_state(call.random)
        arguments, named = call.arguments
        try:
            with torch.no_grad(), without_compiling(), call.autocast(), passes.installed():
                rows = passes.rows_of(*arguments, **named)
        except Exception:  # a value that zeros do not allow
            return False
        finally:
            restore()
        given = {found.name: found.arguments[0][0] for found in inner}
        return given.keys() == rows.keys() and all(_close(given[name], rows[name]) for name in given)

    def _two_passes(self, experts: ExpertList) -> TwoPasses:
        modules = {name: self._modules[name] for name in experts.names}
        exchange = Exchange(modules, experts.widths, group=None, device=self._device)
        return TwoPasses(self._modules[experts.router], modules, exchange)

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
            if any(id(parameter) in held for parameter in expert.parameters()):
                raise Refused(message("experts_share_weights", expert=name))
            held |= {id(parameter) for parameter in expert.parameters()}
        for name, expert in modules.items():
            if any(True for _ in expert.buffers()):
                raise Refused(message("experts_with_buffers", expert=name))
            if name in self._hooked:
                raise Refused(message("experts_with_hooks", expert=name))
            if self._reads.outside(name, expert):
                raise Refused(message("experts_read_outside", expert=name))

    def check_together(self, lists: Sequence[ExpertList]) -> None:
        """Raises Refused where the loss or a gradient is another one when routers are computed twice."""
        with ExitStack() as stack:
            for experts in lists:
                stack.enter_context(self._two_passes(experts).installed())
            try:
                twice = self._loss_and_gradients()
            except UserError:
                raise
            except Exception as error:  # as of a second derivative
                raise Refused(message("experts_fail_together", error=error_line(error))) from error
        sizes = [float(value.detach().abs().max()) for name, value in self._whole.items() if _is_gradient(name, value)]
        # A gradient that is zero but for rounding, as of a bias before a normalisation, has no size to compare with.
        rounding = max(ROUNDING, _eps(self._whole[""])) * max(sizes, default=0.0)
        wrong = next((n for n, value in self._whole.items() if not _agree(value, twice[n], rounding)), None)
        if wrong is not None:
            what = message("gradient_named", tensor=wrong)
            if wrong.startswith(BUFFER):
                what = message("buffer_named", tensor=wrong.removeprefix(BUFFER))
            elif not wrong:
                what = message("loss_named")
            raise Refused(message("router_is_not_computed_twice", router=lists[0].router, what=what))


class _Reads(TakenTensors):
    """Notes inside of which modules each parameter is read. unfinished: the calls that have begun and not ended."""

    def __init__(self, model: nn.Module, unfinished: Sequence[Call]) -> None:
        super().__init__()
        self._parameters, self._unfinished = {id(parameter) for parameter in model.parameters()}, unfinished
        self._inside: dict[int, set[tuple[str, ...]]] = {}

    def note(self, operation: Any, tensor: Tensor) -> None:
        if id(tensor) in self._parameters:
            self._inside.setdefault(id(tensor), set()).add(tuple(call.name for call in self._unfinished))

    def outside(self, name: str, module: nn.Module) -> bool:
        """Returns whether a parameter of a module is read where the module is not called."""
        reads = [inside for parameter in module.parameters() for inside in self._inside.get(id(parameter), ())]
        return any(name not in inside for inside in reads)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_pre_hooks or module._forward_hooks)


def _autocast_of(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Returns a function that returns a context in autocast, or not, as it is now."""
    kind = device.partition(":")[0]
    enabled = torch.is_autocast_enabled(kind)
    return partial(torch.autocast, kind, torch.get_autocast_dtype(kind), enabled=enabled) if enabled else nullcontext


def _eps(value: Any) -> float:
    return torch.finfo(value.dtype).eps if isinstance(value, Tensor) and value.is_floating_point() else 0.0


def _is_gradient(name: str, value: Any) -> bool:
    return value is not None and bool(value.numel()) and not name.startswith(BUFFER)


def _close(expected: Any, given: Any) -> bool:
    return is_close(expected, given, tolerance=max(CLOSE, ULPS * _eps(expected)))


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
