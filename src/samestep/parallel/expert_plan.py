"""Which modules of a model are experts, that ranks can have some of each: found by trying them in one process.

Experts are modules of one list that are alike, and that one module, the router's, calls with some rows each. It must be
possible to compute the router's module twice: once to know the rows, and again with what the experts return for them.
Neither may depend on the other rows, nor draw random numbers in an expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samestep.bounds import DIVIDED_APART, EXCHANGED_GRADIENT, EXCHANGED_ULPS
from samestep.errors import Refused, UserError
from samestep.job import Batch, Job
from samestep.message import Message, message
from samestep.parallel.expert_exchange import Exchange, TwoPasses
from samestep.parallel.plan_trial import Trial, is_close, rounding_of, tried, without_compiling
from samestep.parallel.recorded_forward import Call, RecordedForward
from samestep.rank.step import keep_state
from samestep.rank.threaded_group import alike_on_ranks
from samestep.world.foreign_code import error_line

ROWS = 4  # rows of the batch on which experts are looked for
SEED = 11
BUFFER = "buffer "
_close = partial(is_close, tolerance=DIVIDED_APART, ulps=EXCHANGED_ULPS)


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
        trial = tried(job, ROWS, device, partial(ExpertTrial, job, device))
        found = [experts for experts in trial.candidates() if trial.are_apart(experts)]
        if not found:
            raise Refused(message("model_without_experts"))
        lists = [experts for experts in found if len(experts.names) % ranks == 0]
        if not lists:
            fields = {"router": found[0].router, "experts": len(found[0].names), "ranks": ranks}
            raise Refused(message("experts_do_not_divide", **fields))
        # The rank that has an expert computes the modules inside of it.
        outer = tuple(f"{name}." for experts in lists for name in experts.names)
        lists = [experts for experts in lists if not f"{experts.router}.".startswith(outer)]
        for experts in lists:
            trial.check(experts)
        trial.check_together(lists)
    return ExpertPlan(tuple(lists))


class ExpertTrial(Trial):
    """A model and a few rows, on which its modules are tried. record: of the whole model's forward pass."""

    def __init__(self, job: Job, device: str, batch: Batch) -> None:
        super().__init__(job, device, batch, seed=SEED)
        self._modules = dict(self.model.named_modules())
        self.record = RecordedForward(self._modules, device)
        self._whole = self._loss_and_gradients(self.record)

    def _loss_and_gradients(self, record: RecordedForward | None = None) -> dict[str, Any]:
        """Returns the loss, the gradient of each parameter or None, and what each buffer has become."""
        self.model.zero_grad()
        with record or nullcontext():
            loss = self.output_and_loss()[1]
        if loss.requires_grad:
            loss.backward()
        buffers = {f"{BUFFER}{name}": buffer.detach().clone() for name, buffer in self.model.named_buffers()}
        self.restore()
        gradients = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        return {"": loss.detach(), **gradients, **buffers}

    def candidates(self) -> Iterator[ExpertList]:
        """Yields the lists of modules that are alike, and that one module calls at most once in each of its calls."""
        for name, module in self._modules.items():
            if not isinstance(module, nn.ModuleList | nn.ModuleDict) or len(module) < 2:
                continue
            names = tuple(f"{name}.{key}".lstrip(".") for key, _ in module.named_children())
            alike = len({_shape_of(self._modules[expert]) for expert in names}) == 1
            called = [(call, inner) for call in self.record.calls for inner in call.inner if inner.name in names]
            if not (alike and called and all(_takes_rows(inner) for _, inner in called)):
                continue
            routers = {call.name for call, _ in called}
            widths = {(inner.arguments[0].shape[-1], inner.output[0].shape[-1]) for _, inner in called}
            if len(routers) == len(widths) == 1 and len(names) == len(module):
                yield ExpertList(routers.pop(), names, widths.pop())

    def are_apart(self, experts: ExpertList) -> bool:
        """Returns whether no expert's input depends on another expert's output, and each gives its rows' outputs,
        whichever rows are beside them."""
        some = False
        for call in (call for call in self.record.calls if call.name == experts.router):
            inner = [inner for inner in call.inner if inner.name in experts.names]
            if len({found.name for found in inner}) < len(inner):
                return False
            for found in inner:
                rows = found.arguments[0].detach()
                some |= rows.numel() > 0
                if not self._gives_rows_alone(found, rows):
                    return False
            if inner and not self._has_same_inputs(call, experts, inner):
                return False
        return some

    def _gives_rows_alone(self, call: Call, rows: Tensor) -> bool:
        """Returns whether an expert gives every second row's output from these rows alone. An expert with dropout is
        tried without."""
        expert = call.module
        if not rows.numel():
            return True
        restore = keep_state(expert)
        try:
            with torch.no_grad(), torch.random.fork_rng(), call.autocast():
                expert.train(not call.draws)
                outputs, some = (expert(part).flatten(0, -2) for part in (rows, rows.flatten(0, -2)[::2]))
        except Exception:  # a shape that it does not take
            return False
        finally:
            expert.train()
            restore()
        return _close(outputs[::2], some)

    def _has_same_inputs(self, call: Call, experts: ExpertList, inner: Sequence[Call]) -> bool:
        """Returns whether a router gives its experts the same rows where they all return zeros."""
        passes, restore = self._two_passes(experts), keep_state(call.module)
        self.generator.set_state(call.random)
        try:
            arguments, named = call.rebuilt(call.arguments)
            with torch.no_grad(), without_compiling(), call.autocast(), passes.installed():
                rows = passes.rows_of(*arguments, **named)
        except Exception:  # a value that zeros do not allow
            return False
        finally:
            restore()
        given = {found.name: found.arguments[0] for found in inner}
        return given.keys() == rows.keys() and all(_close(given[name], rows[name]) for name in given)

    def _two_passes(self, experts: ExpertList) -> TwoPasses:
        modules = {name: self._modules[name] for name in experts.names}
        exchange = Exchange(modules, experts.widths, group=None, device=self.device)
        return TwoPasses(self._modules[experts.router], modules, exchange)

    def check(self, experts: ExpertList) -> None:
        """Raises Refused for experts that draw random numbers, or have buffers or shared weights."""
        if any(call.draws for call in self.record.calls if call.name in experts.names):
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
            if _has_hooks(expert):
                raise Refused(message("experts_with_hooks", expert=name))
            expert_tensors = {f"{name}.{tensor}" for tensor, _ in expert.named_parameters()}
            if any(
                read.tensor in expert_tensors and name not in [c.name for c in read.inside]
                for read in self.record.reads
            ):
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
        share = max(EXCHANGED_GRADIENT, torch.finfo(self._whole[""].dtype).eps)
        rounding = rounding_of((v for name, v in self._whole.items() if not name.startswith(BUFFER)), share)
        wrong = next((n for n, v in self._whole.items() if not _close(v, twice[n], rounding=rounding)), None)
        if wrong is not None:
            what = message("gradient_named", tensor=wrong)
            if wrong.startswith(BUFFER):
                what = message("buffer_named", tensor=wrong.removeprefix(BUFFER))
            elif not wrong:
                what = message("loss_named")
            raise Refused(message("router_is_not_computed_twice", router=lists[0].router, what=what))


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_pre_hooks or module._forward_hooks)


def _shape_of(module: nn.Module) -> str:
    """Returns a text that is the same for modules that are alike."""
    return str(
        (type(module), [(name, parameter.shape, parameter.dtype) for name, parameter in module.named_parameters()])
    )


def _takes_rows(call: Call) -> bool:
    """Returns whether a module was called with one tensor, and returned as many rows."""
    leaves = [*call.arguments, *call.output]
    if len(call.arguments) != 1 or len(leaves) != 2 or not all(isinstance(leaf, Tensor) for leaf in leaves):
        return False
    rows, output = leaves
    (arguments, named) = call.rebuilt([rows])
    return not named and arguments == (rows,) and rows.dim() > 1 and rows.shape[:-1] == output.shape[:-1]
