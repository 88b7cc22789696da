"""Recorder: hooks that record any training in PyTorch."""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.job.foreign import ById, parameters_in
from samestep.rank.hooks import Hooks
from samestep.recorder import patches, sharding
from samestep.recorder.batches import holds_loss
from samestep.recorder.call_sites import CallSites
from samestep.recorder.evaluations import Evaluations, process_groups
from samestep.recorder.group_operations import FirstForward, GroupOperations
from samestep.recorder.guards import recorder_guard
from samestep.recorder.leaving import Leaving
from samestep.recorder.loaders import Loaders, other_inputs, rows_of
from samestep.recorder.loop_lengths import loops_around
from samestep.recorder.losses import cut_gathers, functions_of, nodes_of, normalises_rows, scalar_of, targets_of, terms
from samestep.recorder.modes import Modes
from samestep.recorder.optimizer_steps import OptimizerSteps
from samestep.recorder.parameters import Parameters
from samestep.recorder.pipelines import Pipelines
from samestep.recorder.random_numbers import Randoms
from samestep.recorder.reports import Reports
from samestep.recorder.row_draws import RowDraws
from samestep.recorder.settings import schedule_record, settings_of
from samestep.recorder.steps_alone import StepsAlone
from samestep.recorder.steps_to_record import StepsToRecord
from samestep.recorder.untrained_tensors import Untrained, patch_copies
from samestep.recorder.weights_apart import WeightsApart
from samestep.recorder.window import Window, dtype_name
from samestep.records.call_site import Call
from samestep.records.files import write
from samestep.records.script import (
    AFTER,
    AVERAGE,
    BEFORE,
    CLOSURES,
    ENGINE_CLIPPING,
    ClipRecord,
    ClosureRecord,
    GroupSettings,
    LoopRecord,
    ScriptRecord,
    StepRecord,
)
from samestep.records.script_plan import ScriptPlan
from samestep.world import World
from samestep.world.heartbeat import BACKWARD, EVALUATION, FORWARD, heartbeat

COMMUNICATE = ("horovod", "mpi4py", "ray", "flwr", "bagua", "byteps")
IMPORTED = ("lightning", "transformers", "deepspeed", "horovod")


def may_communicate(parameters: Iterable[Tensor]) -> bool:
    """Returns whether this process could tell others anything: by torch's process group, by another library, or by
    weights in shared memory."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return True
    rpc = sys.modules.get("torch.distributed.rpc")
    if any(name in sys.modules for name in COMMUNICATE) or (rpc and rpc.api._is_current_rpc_agent_set()):
        return True
    return any(parameter.device.type == "cpu" and parameter.is_shared() for parameter in parameters)


def libraries_that_train() -> list[str]:
    """Returns the libraries that train in this process, of those that change what a step is.

    Accelerate counts where the script has made an Accelerator: others import it, too.
    """
    accelerate = sys.modules.get("accelerate.state")
    made = ["accelerate"] if accelerate and accelerate.is_initialized() else []
    return [*made, *(name for name in IMPORTED if name in sys.modules)]


class Timed:
    """Adds up how long recording takes. seconds: of the functions that are called through it. step_s: of each step."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.step_s: list[float] = []
        self._stepped_at = time.perf_counter()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function, timed."""

        def wrapper(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - began

        return wrapper

    def end_step(self) -> None:
        now = time.perf_counter()
        self.step_s.append(now - self._stepped_at)
        self._stepped_at = now


class Closures:
    """Counts the calls of one rank's optimizer closure, in a file that is there also where the script then fails or
    hangs. A closure that is called once a step, as Lightning's, is in no file."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / CLOSURES.format(rank)
        self._calls: list[int] = []
        self._several = False

    def count(self, step: int, calls: int, done: bool = False) -> None:
        """Notes how many calls a step has had by now. done: whether the step has ended."""
        self._calls = [*self._calls[:step], *[0] * (step - len(self._calls)), calls]
        self._several = self._several or calls > 1
        if self._several:
            write(self._path, ClosureRecord(self._calls, step + done))


class Recorder:
    """Records this process's training from `attach` on. enough: called after the last step that was asked.

    engine: DeepSpeed's, where it trains.
    """

    def __init__(self, plan: ScriptPlan, world: World, enough: Callable[[ScriptRecord], None]) -> None:
        self._plan, self._world, self._enough, self._folder = plan, world, enough, Path(plan.out)
        # The functions of a replay end it by themselves.
        self.hooks = Hooks(None if plan.replay else recorder_guard)
        self.leaving = Leaving(lambda: len(self.steps))
        self.timed, self.ended, self.reduces_in_forward = Timed(), False, False
        self._may_communicate = False
        self._functions = set[str]()  # the functions of the first step's losses
        self._gathers = False  # whether tensors were gathered since the last backward pass
        self._rollouts = Counter[int]()  # step -> forwards without gradients in training mode before it
        self.on_restart: Callable[[], None] = lambda: None
        # Called around each step of an engine, with its optimizer, and whether the step was taken.
        self.before_engine_step: Callable[[Any], None] = lambda optimizer: None
        self.after_engine_step: Callable[[Any, bool], None] = lambda optimizer, taken: None
        self._engine_rates: list[float] = []  # the rates before the engine's step, which also advances its schedule
        self._alone = StepsAlone(self._folder, world)
        self._skipped = plan.replay.alone if plan.replay else 0  # steps that rank 0 had taken alone
        self.engine: Any = None
        self.parameters = Parameters(world.size, on_gradient=self._add_gradient)
        self._weights_apart = WeightsApart(self.parameters, is_recorded=world.size > 1 and plan.replay is None)
        self.window, self.steps = Window(), list[StepRecord]()
        self._taken: dict[str, Tensor] = {}  # the gradients of the present step
        self._buffers: dict[str, int] = {}  # digests of the buffers after the first step
        self._backward_depth = 0
        self._optimizer_steps = OptimizerSteps(
            begin=self._begin_step, take=self._take, around_call=self._around_closure, end=self._after_step
        )
        self._first_sums: dict[str, Tensor] = {}  # of the weights before the first step
        self._settings: dict[int, list[GroupSettings]] = {}  # id of an optimizer -> its settings in the last step
        self._optimizers, self._schedulers = list[Optimizer](), list[LRScheduler]()
        self._loops = list[LoopRecord]()  # the loops around the first step
        self._closures, self._randoms, self._saves = Closures(self._folder, world.rank), Randoms(), patches.Saves()
        self._row_draws = RowDraws(self._folder, world.rank, self._randoms)
        self._reductions = patches.Reductions()
        folder = Path.cwd() if plan.module else Path(plan.script).parent
        self.group_operations, self._first_forward = GroupOperations(world.rank), FirstForward(self._sites_are_users)
        self._located = ById[None]()  # objects whose lines are noted
        self._modes, self._reached = Modes(), set[str]()  # parameters to which the present backward pass has come
        self._sites = CallSites(str(folder), lambda: len(self.steps))
        self.pipelines = Pipelines(
            self._folder, world, keep=plan.keep, steps_done=lambda: len(self.steps), note=self._sites.note
        )
        self.loaders = Loaders(self.timed, self._randoms.begin_pass, self._sites.made_at, self._row_draws.begin)
        self._steps_to_record = StepsToRecord(plan, world.rank, world.size, lambda: self.loaders.passes)
        self._reports = Reports(self._sites, lambda: len(self.steps))
        self._evaluations, self._untrained = Evaluations(self.loaders), Untrained(self.parameters.is_trained)

    def attach(self) -> None:
        """Installs the hooks in torch. The script is not changed."""
        hooks = self.hooks
        self._optimizer_steps.attach()
        patches.patch_forwards(hooks, self._around_forward)
        patches.patch_autograd(hooks, self._begin_backward, self._end_backward)
        patches.patch_clipping(hooks, self._clip)
        patches.patch_scaler(hooks, self._unscale)
        patches.patch_zero_grad(hooks, self._zero_grad)
        patches.patch_gathers(hooks, self._gather)
        self._reductions.attach(hooks)
        patches.patch_autocast(hooks, lambda dtype: self.window.autocast.add(dtype_name(dtype)))
        self.loaders.attach(hooks)
        self.leaving.patch_loads(hooks)
        # A replay draws the numbers of the ranks, and records none.
        if not self._plan.replay:
            self._row_draws.attach(hooks)
        patches.patch_schedulers(hooks, self._schedulers.append)
        self._saves.attach(hooks, lambda: len(self.steps))
        self._sites.attach(hooks)
        self._reports.attach(hooks)
        self.pipelines.attach(hooks)
        self.parameters.pieces.attach(hooks)
        patch_copies(hooks, self._untrained.copies)

    def begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Records the steps of this optimizer alone, from this model's present weights on."""
        self._optimizer_steps.only = optimizer
        patches.TrainingMode.was_seen = patches.is_in_training_mode(model)
        self._add_module(model)

    def release(self) -> None:
        """Ends the recording, and lets go of the model: the training frees it, and its process group, when it will."""
        self.ended = True
        self.hooks.detach()
        self._optimizer_steps.detach()
        self.parameters.release()
        self._sites.release()
        self._untrained.release()
        self._modes.release()
        self.window = Window()
        for held in (self._optimizers, self._schedulers, self._taken):
            held.clear()

    def record(self, ended: Literal["steps", "itself"]) -> ScriptRecord:
        """Returns what has been recorded."""
        return ScriptRecord(
            rank=self._world.rank,
            size=self._world.size,
            start=self.parameters.start,
            steps=self.steps,
            passes=[loader_pass.record() for loader_pass in self.loaders.passes],
            ended=ended,
            left=self.leaving.reason,
            libraries=libraries_that_train(),
            record_s=self.timed.seconds,
            step_s=self.timed.step_s,
            epochs_set=self.loaders.epochs_set,
            buffers=self._buffers,
            evaluations=self._evaluations.records(),
            reports=self._reports.records(),
            randoms=replace(
                self._randoms.record,
                beside=self._row_draws.beside,
                fetched=self._row_draws.fetched(self.loaders.trained_datasets()),
            ),
            groups=process_groups(),
            saves=self._saves.records(),
            calls=[*self._sites.records(self._numbers()), *self.leaving.calls()],
            untrained=self._untrained.records(),
            alone=self._alone.taken,
            rollouts=[(step, forwards) for step, forwards in self._rollouts.items() if forwards],
            ties=self.parameters.ties,
            still=self.parameters.still(),
            loops=self._loops,
            schedules=[schedule_record(number, scheduler) for number, scheduler in enumerate(self._schedulers)],
            follows=self._untrained.follows(self.parameters.by_name, self.parameters.start),
            meshes=self.parameters.pieces.meshes,
            pieces=self.parameters.pieces.by_name,
            divides_inputs=self.parameters.pieces.divides_inputs,
            reduces_in_forward=self.reduces_in_forward,
            may_communicate=self._may_communicate,
            stages=self.pipelines.records(),
            talks=self.group_operations.records(),
            shapes=self.parameters.shapes,
            uniform=self.parameters.uniform,
            modules=self._first_forward.modules,
            functions=sorted(self._functions),
        )

    def _numbers(self) -> dict[int, int]:
        """Returns the numbers of loaders and their samplers, optimizers and schedulers, by their ids."""
        numbers = self.loaders.numbers()
        for things in (self._optimizers, self._schedulers):
            numbers |= {id(thing): number for number, thing in enumerate(things)}
        return numbers

    # Forward and backward

    def _around_forward(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not any(parameter.requires_grad for parameter in parameters_in(module)):
            self.timed(self._note_forward)("frozen forward", module)
            self.timed(self._add_frozen)(module)
            return call(*args, **kwargs)
        self._restart_if_needed(module)
        step = len(self.steps)
        heartbeat.begin(FORWARD if patches.trains(module) else EVALUATION, step)
        if not patches.trains(module):
            self._rollouts[step] += patches.is_in_training_mode(module)
            self.timed(self._note_forward)("evaluation", module)
            self.timed(self._reports.begin_forward)()
            output = self._row_draws.around_forward(functools.partial(call, *args, **kwargs))
            self.timed(self._reports.end_forward)()
            # In training mode it is a rollout.
            with_loss = not patches.is_in_training_mode(module) and holds_loss(output, graph=False)
            self.timed(self._evaluations.evaluated)(module, step, (args, kwargs), with_loss)
            self._untrained.call(module)
            return output
        self.timed(self._begin_forward)(module, (args, kwargs))
        before, begun = self.timed(self._randoms.before)(step), self._reductions.begun
        with self.group_operations.forward(), self._first_forward.watched(module):
            output = self._row_draws.around_forward(functools.partial(call, *args, **kwargs))
        self.timed(self._randoms.after)(step, before)
        if not self.steps:
            self.window.returned |= self.timed(nodes_of)(output)
        self.reduces_in_forward |= self._reductions.begun > begun
        return output

    def _sites_are_users(self, file: str) -> bool:
        return self._sites.is_users(file)

    def _note_forward(self, call: Call, module: nn.Module) -> None:
        self._sites.note(call, type(module).__name__)
        if module not in self._located:
            self._located.put(module, None)
            self._sites.note_model(module)

    def _restart_if_needed(self, module: nn.Module) -> None:
        """Forgets forwards that turn out to be no training, and steps that this rank has taken alone."""
        mode = patches.TrainingMode
        if torch.is_grad_enabled() and not mode.was_seen and patches.is_in_training_mode(module):
            mode.was_seen = True
            if self.window.micro_batches and not self.steps and not self.window.done:
                self._forget_forwards()
        is_new = bool(self.steps) and not any(map(self.parameters.is_trained, parameters_in(module)))
        if is_new and patches.trains(module) and not self.skips and self._alone.were_before_meeting():
            self._forget_steps()
        self._alone.begin_forward()

    def _forget_forwards(self) -> None:
        self.window = Window(autocast=self.window.autocast)
        self.loaders.forget_training()
        self.on_restart()

    def _forget_steps(self) -> None:
        """Begins anew: the steps so far were taken alone."""
        self._alone.end(len(self.steps))
        self._skipped = 0
        self.steps, self.timed.step_s = [], []
        self.parameters.forget()
        self._untrained.forget()
        self._evaluations.forget()
        self._reports.forget()
        self._optimizers.clear()
        self._settings.clear()
        self._rollouts.clear()
        self._randoms.record, self._row_draws.beside = Randoms().record, []
        self._forget_forwards()

    @property
    def skips(self) -> bool:
        """Whether the steps of a replay are still those that rank 0 has taken alone."""
        return self._skipped > 0

    def _begin_forward(self, module: nn.Module, inputs: Any) -> None:
        """Begins a training forward of an outermost module."""
        self._evaluations.trains()
        self._reports.end()
        self._note_forward("forward", module)
        self._add_module(module)
        self.parameters.pieces.begin_forward(inputs)
        self._untrained.note_updates()
        self._weights_apart.begin_forward()
        micro_batch = self.window.current()
        rows = rows_of(inputs)
        micro_batch.rows += rows
        micro_batch.forwards += 1
        micro_batch.other_inputs += [] if self.steps else other_inputs(inputs)
        self._row_draws.train(len(self.steps), len(rows), inputs)
        numbers = self.loaders.trained(rows)
        micro_batch.passes += [number for number in numbers if number not in micro_batch.passes]

    def _add_module(self, module: nn.Module) -> None:
        if self.engine is None and sharding.is_engine(module):
            self.engine = module
            sharding.patch_engine_step(self.hooks, module, self._before_engine_step, self._after_engine_step)
        self.parameters.flattened.patch_clipping(self.hooks, module, self.timed(self._record_clip))
        self.parameters.add(module)
        self._modes.add(module, self.parameters.names)
        self._untrained.add(module)

    def _add_frozen(self, module: nn.Module) -> None:
        self.parameters.add_frozen(module)
        self._untrained.add(module)
        self._untrained.call(module)

    def _add_gradient(self, name: str, gradient: Tensor) -> None:
        if not self.ended:
            self._reached.add(name)
            self.timed(self.window.add)(name, gradient)

    def _begin_backward(self, loss: Any) -> None:
        heartbeat.begin(BACKWARD, len(self.steps))
        self._backward_depth += 1
        if self._backward_depth == 1:
            self.timed(self.parameters.begin_backward)()
        scalar = scalar_of(loss)
        if self._backward_depth == 1 and self.parameters.by_name and scalar is not None:
            self.timed(self._untrained.note_updates)()
            losses = terms(scalar)
            if not self.steps:
                self._functions |= self.timed(functions_of)(scalar)
                self.window.current().targets += self.timed(targets_of)(scalar)
                self.window.own_statistics |= self.timed(normalises_rows)(scalar, self.window.returned)
            if self._gathers:
                self.window.cut_gathers += self.timed(cut_gathers)(scalar, self._world.size)
                self._gathers = False
            micro_batch = self.window.current()
            micro_batch.losses = micro_batch.losses or losses
            micro_batch.value = float(scalar.detach()) if micro_batch.value is None else micro_batch.value

    def _end_backward(self) -> None:
        self._backward_depth -= 1
        if self._backward_depth == 0:
            self.timed(self.parameters.end_backward)()
            self.timed(self._note_modes)()
            self.window.done = len(self.window.micro_batches)

    def _note_modes(self) -> None:
        if self._reached and self.window.micro_batches:
            self.window.micro_batches[-1].modes = self._modes.at_backward(self._reached)
        self._reached.clear()

    def _gather(self, has_gradient: bool) -> None:
        self._gathers = True
        self.window.gathers += has_gradient

    # What is done to the gradients

    def _zero_grad(self) -> None:
        # DeepSpeed's engine clears them at the end of its step.
        if not (self.engine and self._optimizer_steps.depth):
            self.window.clear()

    def _clip(self, parameters: list[Tensor], limit: float | None) -> None:
        self.timed(self._record_clip)(parameters, limit, self.parameters.flattened.are_shared_out())

    def _record_clip(self, parameters: list[Tensor], limit: float | None, of_pieces: bool = False) -> None:
        window = self.window
        if window.unclipped_after != window.done:
            window.unclipped_after, window.unclipped = window.done, self.parameters.gradients(window.local)
        clipped = sum(parameter.grad is not None for parameter in parameters)
        window.clips.append(ClipRecord(window.done, clipped, self.parameters.with_gradient(), limit, of_pieces))

    def _unscale(self, scale: float) -> None:
        self.window.scale = scale

    # The optimizer's step

    def _begin_step(self) -> None:
        self._taken = {}
        self.timed(self._weights_apart.begin_step)()
        self.window.unawaited = self._reductions.unawaited()
        self.timed(self._sites.note)("optimizer step")
        if not self.steps:
            self._loops = self.timed(loops_around)(sys._getframe(), self._sites.is_users)
            self._first_sums = self.timed(self._sums_of_weights)(BEFORE)
        self.timed(self._untrained.note_updates)(self.window.done > 0)

    def _sums_of_weights(self, kind: str) -> dict[str, Tensor]:
        """Returns the sums of the weights as they are now, where the plan asks for them. kind: BEFORE or AFTER."""
        sums = self.parameters.sums() if self._plan.weights else {}
        return {kind.format(name): array for name, array in sums.items()}

    def _sums_of_step(self, changed: Iterable[str]) -> dict[str, Tensor]:
        """Returns the sums of the weights after a step, and of what is not trained and has changed."""
        if not self._plan.weights:
            return {}
        averages = self._untrained.sums(changed if self.steps else None)
        sums = self._sums_of_weights(AFTER) | {AVERAGE.format(name): array for name, array in averages.items()}
        first, self._first_sums = self._first_sums, {}
        return first | sums

    def _new_settings(self, optimizer: Optimizer) -> list[GroupSettings]:
        """Returns the settings of an optimizer's groups; none where they are those of its step before."""
        settings = settings_of(optimizer, self.parameters.of_group)
        if self.engine:
            clipping = {ENGINE_CLIPPING: float(self.engine.gradient_clipping())}
            settings = [replace(group, values={**group.values, **clipping}) for group in settings]
        if self._settings.get(id(optimizer)) == settings:
            return []
        self._settings[id(optimizer)] = settings
        return settings

    def _take(self) -> None:
        """Takes the gradients. Horovod's wrapper reduces them before the optimizer's own step: the last ones count."""
        if not self.engine:
            self._taken = self.timed(self.parameters.gradients)(self.window.local) or self._taken
            self.timed(self._weights_apart.take)(self.window, self._taken)

    def _around_closure(self, closure: Callable[[], Any]) -> Any:
        self.window.begin_again()
        self.timed(self._closures.count)(len(self.steps), self.window.calls)
        loss = closure()
        self.window.removed = []
        self._take()
        return loss

    def _before_engine_step(self) -> None:
        self._optimizer_steps.depth += 1
        optimizer = sharding.optimizer_of_engine(self.engine)
        self._engine_rates = [float(group["lr"]) for group in optimizer.param_groups]
        gradients = self.timed(sharding.engine_gradients)(self.engine, self.parameters.by_name)
        self._taken, self.parameters.shards = gradients
        self.window.scale = sharding.scale_of_engine(self.engine)
        self.before_engine_step(optimizer)

    def _after_engine_step(self) -> None:
        optimizer, taken = sharding.optimizer_of_engine(self.engine), self.engine.was_step_applied()
        self.after_engine_step(optimizer, taken)
        if taken:
            self._optimizer_steps.after(optimizer)
        else:  # the factor of the losses was too large
            self._optimizer_steps.depth -= 1
            self.window = Window()

    def _after_step(self, optimizer: Optimizer) -> None:
        self.timed(self._end_step)(optimizer)
        self.timed.end_step()
        heartbeat.step(len(self.steps))
        self._alone.end_step()
        if self.skips:
            if len(self.steps) == self._skipped:
                self._forget_steps()
            return
        if self._steps_to_record.are_enough(len(self.steps)):
            if self._alone.are_no_others():
                self._forget_steps()
                return
            self._enough(self.record("steps"))

    def _end_step(self, optimizer: Optimizer) -> None:
        # Horovod steps a fresh optimizer before any forward, to create its state.
        if not self.parameters.are_known:
            return
        if all(optimizer is not known for known in self._optimizers):
            self._optimizers.append(optimizer)
        elsewhere = [self.parameters.held_by(known) for known in self._optimizers if known is not optimizer]
        held = self.parameters.held_by(optimizer)
        taken = {
            name: gradient
            for name, gradient in self._taken.items()
            if name in held or not any(name in of_other for of_other in elsewhere)
        }
        window, self.window = self.window, Window()
        if self._world.size > 1 and not self._may_communicate:
            self._may_communicate = may_communicate(self.parameters.by_name.values())
        weights, moved = self.parameters.after_step()
        if not self.steps:
            self._untrained.add_copies(self.parameters.by_name)
        changed, updates, early = self._untrained.after_step()
        sums = self._sums_of_step(changed) | self._weights_apart.end_step(optimizer, self._optimizers)
        window.write(self._folder, self._world.rank, len(self.steps), taken, sums)
        schedulers = [scheduler for scheduler in self._schedulers if patches.optimizer_of(scheduler) is optimizer]
        self.steps.append(
            StepRecord(
                optimizer=next(number for number, known in enumerate(self._optimizers) if known is optimizer),
                micro_batches=[micro_batch.record() for micro_batch in window.micro_batches],
                rates=self._engine_rates or [float(group["lr"]) for group in optimizer.param_groups],
                schedules=[int(scheduler.last_epoch) for scheduler in schedulers],
                clips=window.clip_records(),
                cleared=window.cleared,
                scale=window.scale,
                weights=weights,
                moved=moved,
                dtypes=sorted(self.parameters.precisions() | window.dtypes),
                sharded=self.parameters.hides_shards(),
                shards=[*self.parameters.shards],
                computed=sorted(window.autocast),
                held=held,
                lost=[] if taken else window.computed_gradients(),
                calls=window.calls,
                splits=self.parameters.splits,
                changed=changed,
                updates=updates,
                early=early,
                gathers=window.gathers,
                cut_gathers=window.cut_gathers,
                own_statistics=window.own_statistics,
                late_clips=window.late_clips,
                unawaited=window.unawaited,
                foreign=sum(len(group["params"]) for group in optimizer.param_groups) - len(held),
                uncleared=[] if self.engine else self.parameters.uncleared(held),
                settings=self._new_settings(optimizer),
                begun=self._weights_apart.begun,
                modes=self._modes.of_optimizer(window.modes, held),
            )
        )
        if window.calls:
            self._closures.count(len(self.steps) - 1, window.calls, done=True)
        if len(self.steps) == 1:
            self._buffers = self.parameters.buffers()
