"""The stages of a pipeline that a rank holds, as torch.distributed.pipelining runs them: which they are, and, for the
chain that one process plays, what they are given, their weights before each step, and the modules themselves."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from samestep.job.foreign import is_a, named_parameters_in, parameters_in
from samestep.message import Message, message
from samestep.rank.hooks import Hooks
from samestep.rank.shards import is_shard
from samestep.recorder.batches import copied
from samestep.recorder.parameters import plain
from samestep.recorder.random_numbers import random_states
from samestep.recorder.sharding import digests_of
from samestep.records.call_site import Call
from samestep.records.divided_models import StageRecord
from samestep.records.files import replace_by
from samestep.records.pipeline_replay import STAGES
from samestep.world import World

SCHEDULES, STAGE = "torch.distributed.pipelining.schedules", "torch.distributed.pipelining.stage"
TRACER = "torch.distributed.pipelining._IR"
LOCAL_NAME = "<locals>"  # in the qualified name of what a function defines


@dataclass
class ScheduleCall:
    """One call of a schedule's step. step: the optimizer steps before it. args, targets: of each micro-batch, for the
    first and the last stage. random_states: of each (stage, micro-batch), before its forward."""

    step: int
    args: list[Any]
    kwargs: list[Any]
    targets: list[Any] | None
    loss_kwargs: dict[str, Any] = field(default_factory=dict)
    random_states: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


@dataclass
class KeptStages:
    """What a rank keeps for the chain. modules: pickled, by the stages' numbers. traced: whether the stages are torch's
    tracer's instead, which cannot be pickled, and which each rank has made of the model. weights: before each step."""

    stages: list[StageRecord] = field(default_factory=list)
    modules: bytes = b""
    traced: bool = False
    calls: list[ScheduleCall] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    why_not: Message | None = None


@dataclass
class TracedStages:
    """What torch's tracer makes of a model. graph: of all stages. copies: of each parameter that several stages use,
    the names of the stages and of the parameter in each, which has a copy of it."""

    graph: fx.GraphModule
    copies: Sequence[Mapping[str, str]]

    @property
    def stages(self) -> list[str]:
        """The names of the stages, in their order."""
        return [str(node.target) for node in self.graph.graph.nodes if node.op == "call_module"]


class Pipelines:
    """Records the pipeline of this rank. keep: whether to keep the stages and inputs for the chain. steps_done: returns
    the optimizer steps so far. note: called with what is made or called, from the user's line."""

    def __init__(
        self, folder: Path, world: World, *, keep: bool, steps_done: Callable[[], int], note: Callable[[Call], None]
    ) -> None:
        self._folder, self._world, self._keep = folder, world, keep
        self._steps_done, self._note = steps_done, note
        self.kept = KeptStages()
        self.schedule: Any = None  # the schedule that is trained
        self.traced: TracedStages | None = None
        self._pipe: Any = None  # the tracer's result, until the first step
        self._module_of: Any = None  # the tracer's function, unpatched
        self._model: dict[str, int] = {}  # digests of the model that the stages are cut out of

    def attach(self, hooks: Hooks) -> None:
        """Patches torch's schedules when they are imported, which takes long."""
        hooks.after_import(SCHEDULES, functools.partial(self._patch, hooks))

    def records(self) -> list[StageRecord]:
        return self.kept.stages

    def write(self) -> None:
        """Writes what the chain needs into the folder."""
        if self.schedule is not None:
            replace_by(self._folder / STAGES.format(self._world.rank), lambda file: _dump(self.kept, file), sync=False)

    def _patch(self, hooks: Hooks) -> None:
        schedule, stage = sys.modules[SCHEDULES]._PipelineSchedule, sys.modules[STAGE]._PipelineStageBase
        pipe = sys.modules[TRACER].Pipe
        self._module_of = pipe.get_stage_module

        def new_module_of(module_of: Any, traced_pipe: Any, stage_idx: int) -> Any:
            self._pipe = traced_pipe if self._keep else None
            return module_of(traced_pipe, stage_idx)

        def new_schedule(init: Any, made: Any, /, *args: Any, **kwargs: Any) -> None:
            self._note("pipeline schedule")
            init(made, *args, **kwargs)

        def new_stage(init: Any, made: Any, /, *args: Any, **kwargs: Any) -> None:
            self._note("pipeline stage")
            init(made, *args, **kwargs)
            self._find_model(made)

        def new_check(
            check: Any,
            running_schedule: Any,
            arg_mbs: Any = None,
            kwarg_mbs: Any = None,
            target_mbs: Any = None,
            *arguments: Any,
        ) -> Any:
            checked = check(running_schedule, arg_mbs, kwarg_mbs, target_mbs, *arguments)
            if running_schedule._has_backward and torch.is_grad_enabled():
                self._note("pipeline step")
                self._begin(running_schedule, checked[0], checked[1], target_mbs)
            return checked

        def new_forward(forward: Any, running_stage: Any, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            if self._keep and self.kept.calls and running_stage.has_backward:
                self.kept.calls[-1].random_states[running_stage.stage_index, fwd_chunk_id] = random_states()
            return forward(running_stage, fwd_chunk_id, *args, **kwargs)

        def new_loss(loss: Any, running_schedule: Any, last_stage: Any, *args: Any, **kwargs: Any) -> Any:
            before = len(running_schedule._internal_losses)
            result = loss(running_schedule, last_stage, *args, **kwargs)
            if running_schedule._has_backward and self.kept.calls:
                self.kept.calls[-1].losses += [
                    float(value.detach()) for value in running_schedule._internal_losses[before:]
                ]
                self.kept.calls[-1].loss_kwargs = copied(
                    dict((args[3:4] or (None,))[0] or kwargs.get("loss_kwargs") or {})
                )
            return result

        hooks.attach(pipe, "get_stage_module", new_module_of)
        hooks.attach(schedule, "__init__", new_schedule)
        hooks.attach(schedule, "_check_inputs", new_check)
        hooks.attach(schedule, "_maybe_compute_loss", new_loss)
        hooks.attach(stage, "__init__", new_stage)
        hooks.attach(stage, "forward_one_chunk", new_forward)

    def _find_model(self, stage: Any) -> None:
        """Takes the digests of the whole model, where this rank has it: a module with more than the stage's weights."""
        if self._model:
            return
        held = {id(weight) for weight in parameters_in(stage.submod)}
        largest: dict[str, nn.Parameter] = {}
        for thing in gc.get_objects():
            if issubclass(type(thing), nn.Module) and thing is not stage.submod and "_parameters" in thing.__dict__:
                named = dict(named_parameters_in(thing))
                if len(named) > len(largest) and held and held < {id(weight) for weight in named.values()}:
                    largest = named
        if not any(weight.is_meta or is_shard(weight) for weight in largest.values()):
            self._model = digests_of(largest)

    def _begin(self, schedule: Any, args: list[Any], kwargs: list[Any], targets: list[Any] | None) -> None:
        """Begins a call of a schedule's step."""
        step, stages = self._steps_done(), stages_of(schedule)
        if self.schedule is None:
            self.schedule = schedule
            self.kept.stages = [self._record(schedule, stage) for stage in stages]
            if self._keep:
                self._keep_modules(stages)
        if schedule is not self.schedule:
            self.kept.why_not = self.kept.why_not or message("several_schedules")
        if not self._keep or self.kept.why_not:
            return
        if len(self.kept.weights) == step:
            weights = weights_of({stage.stage_index: unwrapped(stage.submod) for stage in stages})
            self.kept.weights.append({name: weight.detach().cpu().clone() for name, weight in weights.items()})
        try:
            call = ScheduleCall(step, copied(args), copied(kwargs), copied(targets))
        except Exception as error:  # what a batch holds is the script's
            self.kept.why_not = message("batch_not_copied", kind=type(error).__name__, error=str(error))
            return
        self.kept.calls.append(call)

    def _record(self, schedule: Any, stage: Any) -> StageRecord:
        return StageRecord(
            index=stage.stage_index,
            stages=stage.num_stages,
            micro_batches=schedule._n_microbatches,
            schedule=type(schedule).__name__,
            ranks=dist.get_process_group_ranks(stage.group or dist.group.WORLD),
            model=self._model,
        )

    def _keep_modules(self, stages: Sequence[Any]) -> None:
        modules = {stage.stage_index: unwrapped(stage.submod) for stage in stages}
        if any(is_shard(weight) for module in modules.values() for weight in parameters_in(module)):
            self.kept.why_not = message("stages_are_sharded")
            return
        pipe, self._pipe = self._pipe, None
        if pipe is not None and all(self._module_of(pipe, index) is module for index, module in modules.items()):
            self.kept.traced = True
            if pipe.num_stages - 1 in modules:  # this rank plays the chain of stages
                self.traced = TracedStages(copy.deepcopy(pipe.split_gm), pipe.replicated_params)
            return
        file = io.BytesIO()
        try:
            _Pickler(file).dump(modules)
        except Exception as error:  # what a module holds is the script's
            self.kept.why_not = message("stage_not_kept", kind=type(error).__name__)
        self.kept.modules = file.getvalue()


def stages_of(schedule: Any) -> list[Any]:
    return [*schedule._stages] if hasattr(schedule, "_stages") else [schedule._stage]


def unwrapped(module: Any) -> Any:
    """Returns a stage's module without DistributedDataParallel."""
    return module.module if is_a(module, nn.parallel.DistributedDataParallel) else module


def weights_of(modules: Mapping[int, nn.Module]) -> dict[str, nn.Parameter]:
    """Returns the trained parameters of stages, as they are named in a record; one that stages share once."""
    return {name: parameter for name, parameter in parameters_of(modules).items() if parameter.requires_grad}


def parameters_of(modules: Mapping[int, nn.Module]) -> dict[str, nn.Parameter]:
    """Returns all parameters of stages, as they are named in a record; one that stages share once."""
    named, known = dict[str, nn.Parameter](), set[int]()
    for index, module in sorted(modules.items()):
        for name, parameter in named_parameters_in(module):
            if id(parameter) not in known:
                known.add(id(parameter))
                named[f"stage {index}: {plain(name)}"] = parameter
    return named


# Classes and functions that a function of the script defines have no name to be imported by


class _Pickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        if is_a(thing, type | FunctionType) and LOCAL_NAME in thing.__qualname__:
            return _defined_here, (thing.__module__, thing.__qualname__, is_a(thing, type))
        return NotImplemented


def _dump(thing: Any, file: Any) -> None:
    pickle.Pickler(file).dump(thing)


def _defined_here(module: str, name: str, is_class: bool) -> Any:
    """Returns what this process's run of the script has defined of that name, too."""
    kind = type if is_class else FunctionType
    for thing in gc.get_objects():
        if is_a(thing, kind) and (thing.__module__, thing.__qualname__) == (module, name):
            return thing
    raise AttributeError(f"{name} is not defined on this rank")
