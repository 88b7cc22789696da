"""Recorder: hooks that record any training in PyTorch."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from samestep.rank.shards import is_shard
from samestep.recorder import collectives, deepspeed, hooks, shards
from samestep.recorder.closures import Closures
from samestep.recorder.evaluation import Evaluations
from samestep.recorder.flattened import Flattened
from samestep.recorder.libraries import libraries_that_train
from samestep.recorder.loaders import Loaders, rows_of
from samestep.recorder.losses import scalar_of, terms
from samestep.recorder.names import plain, stage_prefix
from samestep.recorder.patches import (
    optimizer_of,
    patch_autocast,
    patch_autograd,
    patch_clipping,
    patch_forwards,
    patch_scaler,
    patch_schedulers,
    patch_zero_grad,
    trains,
)
from samestep.recorder.randoms import Randoms
from samestep.recorder.saves import Saves
from samestep.recorder.timed import Timed
from samestep.recorder.window import Window
from samestep.records.script import ClipSeen, ScriptPlan, ScriptRecord, StepSeen
from samestep.world import World
from samestep.world.heartbeat import BACKWARD, EVALUATION, FORWARD, heartbeat


class Recorder:
    """Records this process's training from `attach` on. enough: called after the last step that was asked."""

    def __init__(self, plan: ScriptPlan, world: World, enough: Callable[[ScriptRecord], None]) -> None:
        self._plan, self._world, self._enough, self._folder = plan, world, enough, Path(plan.out)
        self.parameters: dict[str, nn.Parameter] = {}
        self._names: dict[int, str] = {}  # id of a parameter -> its name
        self._modules: list[nn.Module] = []  # outermost ones that have been trained
        self._frozen: dict[int, nn.Module] = {}  # outermost ones without trainable parameters, by their ids
        self._start, self._buffers = dict[str, int](), dict[str, int]()
        self._before: dict[str, int] = {}  # the digests of what this rank holds, before the step that comes next
        self._shards: list[str] = []  # parameters each element of which is on one rank
        self._unsharded: dict[int, Tensor] = {}  # what stands for them in a forward pass, and for some time after it
        self._hides = self._splits = False  # shards that were never seen as such; a tensor-parallel model
        self.window, self.steps, self._notes = Window(), list[StepSeen](), list[str]()
        self._optimizers, self._schedulers = list[Optimizer](), list[LRScheduler]()
        self._taken: dict[str, Tensor] = {}  # the gradients of the step that goes on
        self._only: Optimizer | None = None  # whose steps count; None: every optimizer's
        self.ended, self._stepping, self._backward = False, 0, 0
        self.engine: Any = None  # DeepSpeed's
        self.timed, self._step_s, self._stepped_at = Timed(), list[float](), time.perf_counter()
        self._closures, self.randoms = Closures(self._folder, world.rank), Randoms()
        self.flattened, self.loaders = Flattened(world.size), Loaders(self.timed, self.randoms.begin_pass)
        self.evaluations, self._saves = Evaluations(self.loaders), Saves()

    def attach(self) -> None:
        """Installs the hooks in torch. The script is not changed."""
        before, after = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
        self._hooks = [before(self._before_step), after(self._after_step)]
        patch_forwards(self._around)
        patch_autograd(self.begin_backward, self.end_backward)
        patch_clipping(self.clip)
        patch_scaler(self.unscale)
        patch_zero_grad(self.zero_grad)
        patch_autocast(lambda dtype: self.window.computed.add(str(dtype).removeprefix("torch.")))
        self.loaders.attach()
        patch_schedulers(self._schedulers.append)
        self._saves.attach(lambda: len(self.steps))

    def begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Records the steps of this optimizer alone, from this model's present weights on."""
        self._only = optimizer
        self._name(model)

    def release(self) -> None:
        """Ends the recording, and lets go of the model: the training frees it, and its process group, when it will."""
        self.ended = True
        for hook in self._hooks:
            hook.remove()
        for held in (self.parameters, self._modules, self._frozen, self._unsharded, self._optimizers, self._schedulers):
            held.clear()
        self._only, self.window = None, Window()
        self._taken.clear()

    def counts(self) -> bool:
        """Whether a step counts by now: Horovod steps a fresh optimizer before any forward, to create its state."""
        return bool(self.parameters) or self._hides

    def record(self, ended: Literal["steps", "itself"]) -> ScriptRecord:
        """Returns what has been recorded."""
        return ScriptRecord(
            self._world.rank,
            self._world.size,
            self._start,
            self.steps,
            [each.seen() for each in self.loaders.passes],
            ended,
            libraries_that_train(),
            self.timed.seconds,
            self._step_s,
            self.loaders.epochs_set,
            self._buffers,
            self._notes,
            self.evaluations.seen(),
            self.randoms.seen,
            collectives.groups(),
            self._saves.seen(),
        )

    def _around(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not any(p.requires_grad for p in module.parameters()):
            self.frozen(module)
            return call(*args, **kwargs)
        self.forward(module, (args, kwargs))
        if not trains(module):
            output = call(*args, **kwargs)
            self.timed(self.evaluations.evaluated)(module, len(self.steps))
            return output
        before = self.timed(self.randoms.before)(len(self.steps))
        output = call(*args, **kwargs)
        self.timed(self.randoms.after)(len(self.steps), before)
        return output

    def forward(self, module: nn.Module, inputs: Any) -> None:
        """Is called before the forward of an outermost module that has parameters."""
        training = trains(module)
        heartbeat.begin(FORWARD if training else EVALUATION, len(self.steps))
        if training:
            self.timed(self._forward)(module, inputs)

    def frozen(self, module: nn.Module) -> None:
        """Is called before the forward of an outermost module without trainable parameters."""
        if id(module) not in self._frozen:
            self._frozen[id(module)] = module
            held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            named = {f"{type(module).__name__} (frozen): {n}": t for n, t in held.items() if not is_lazy(t)}
            self._start |= shards.digests_of({n: t for n, t in named.items() if n not in self._start})

    def _forward(self, module: nn.Module, inputs: Any) -> None:
        self.evaluations.trains()
        self._name(module)
        micro = self.window.current()
        micro.rows += rows_of(inputs)
        number = self.loaders.trained()
        if number is not None and number not in micro.passes:
            micro.passes.append(number)

    def _name(self, module: nn.Module) -> None:
        """Names the parameters of an outermost module, and watches their gradients."""
        if self.engine is None and deepspeed.is_engine(module):
            self.engine = module
            deepspeed.around_step(module, self._before_engine_step, self._after_engine_step)
        new = [(plain(name), p) for name, p in module.named_parameters() if p.requires_grad]
        passing = shards.unsharded(module)
        self._hides = self._hides or bool(passing - {*self._unsharded})
        self.flattened.around_clipping(module, self.clip)
        new = [(name, p) for name, p in new if id(p) not in self._names and id(p) not in passing]
        if not new:
            return
        self._modules.append(module)
        self._splits = self._splits or shards.splits_model(module)
        prefix = stage_prefix()
        frozen = {f"{prefix}{plain(n)} (frozen)": p for n, p in module.named_parameters() if not p.requires_grad}
        self._start |= shards.digests_of({name: p for name, p in frozen.items() if name not in self._start})
        for name, parameter in new:
            name = f"{prefix}{name}"
            if name in self.parameters:  # of another model
                name = f"{type(module).__name__} {len(self._modules)}: {name}"
            self._names[id(parameter)], self.parameters[name] = name, parameter
        names = {id(p): self._names[id(p)] for _, p in new}
        self.flattened.add(module, names, self._local)
        for _, parameter in new:
            if not is_shard(parameter) and id(parameter) not in self.flattened.parts:
                parameter.register_hook(functools.partial(self._local, names[id(parameter)]))
        of_rank = [] if self._splits else [id(p) for _, p in new if shards.is_whole_in_world(p, self._world.size)]
        sharded = {key: names[key] for key in of_rank}
        self._shards += [*sharded.values(), *self.flattened.shards(names)]
        shards.watch(module, sharded, self._unsharded, self._local)
        self._before = shards.digests_of(self.parameters)
        self._start |= {name: value for name, value in self._whole(self._before).items() if name not in self._start}

    def _local(self, name: str, gradient: Tensor) -> None:
        if not self.ended:
            self.timed(self.window.add)(name, gradient)

    def begin_backward(self, loss: Any) -> None:
        """Is called before an outermost backward()."""
        heartbeat.begin(BACKWARD, len(self.steps))
        self._backward += 1
        scalar = scalar_of(loss)
        if self._backward == 1 and self.parameters and scalar is not None:
            losses = terms(scalar)
            micro = self.window.current()
            micro.losses = micro.losses or losses

    def end_backward(self) -> None:
        """Is called after it."""
        self._backward -= 1
        if self._backward == 0:
            self.window.done = len(self.window.micro)

    def zero_grad(self) -> None:
        """Is called by zero_grad() of an optimizer or a module."""
        if not (self.engine and self._stepping):  # the engine clears them at the end of its step
            self.window.clear()

    def clip(self, parameters: list[Tensor], limit: float | None) -> None:
        """Is called before gradients are clipped."""
        self.timed(self._clip)(parameters, limit)

    def _clip(self, parameters: list[Tensor], limit: float | None) -> None:
        window = self.window
        if window.unclipped_after != window.done:
            window.unclipped_after, window.unclipped = window.done, self._gradients()
        clipped = sum(p.grad is not None for p in parameters)
        of = sum(p.grad is not None for p in self.parameters.values())
        window.clips.append(ClipSeen(window.done, clipped, of, limit))

    def unscale(self, scale: float) -> None:
        """Is called before a gradient scaler divides the gradients by its factor."""
        self.window.scale = scale

    def _gradients(self) -> dict[str, Tensor]:
        """Returns the gradients that lie in .grad now, compressed."""
        flat = self.flattened.gradients(self.parameters, self.window.local)
        others = {n: p.grad for n, p in self.parameters.items() if p.grad is not None and n not in flat}
        return flat | {name: shards.part_of(g) for name, g in others.items() if name in self._shards or not is_shard(g)}

    def _whole(self, of: dict[str, int]) -> dict[str, int]:
        sharded = {*self.flattened.shards(self._names)}
        return {n: each for n, each in of.items() if n not in sharded and not shards.is_sharded(self.parameters[n])}

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Takes the gradients; where the optimizer has a closure that computes them, after each call. A wrapper calls
        the optimizer that it wraps, and may reduce the gradients before (Horovod): the last ones count."""
        if self._passes_by(optimizer):
            return None
        self._stepping += 1
        if self._stepping == 1:
            self._taken = {}
        closure = kwargs.get("closure") or next((each for each in args[1:] if callable(each)), None)
        if closure is None:
            self._take()
            return None

        def wrapped(*a: Any, **k: Any) -> Any:
            self.window.begin_again()
            self.timed(self._closures.count)(len(self.steps), self.window.calls)
            loss = closure(*a, **k)
            self.window.removed = []
            self._take()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return tuple(wrapped if each is closure else each for each in args), kwargs

    def _passes_by(self, optimizer: Optimizer) -> bool:
        return self.ended or (self._only is not None and optimizer is not self._only)

    def _before_engine_step(self) -> None:
        self._stepping += 1
        self._taken, self._shards = self.timed(deepspeed.parts)(self.engine, self.parameters)
        self.window.scale = deepspeed.scale_of(self.engine)

    def _after_engine_step(self) -> None:
        if self.engine.was_step_applied():
            self._after_step(deepspeed.optimizer_of(self.engine), (), {})
        else:  # the losses' factor was too large
            self._stepping, self.window = self._stepping - 1, Window()

    def _take(self) -> None:
        if not self.engine:
            self._taken = self.timed(self._gradients)() or self._taken

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._passes_by(optimizer):
            return
        self._stepping -= 1
        if self._stepping:
            return
        self.timed(self._end_step)(optimizer)
        now = time.perf_counter()
        self._step_s.append(now - self._stepped_at)
        self._stepped_at = now
        heartbeat.step(len(self.steps))
        if len(self.steps) >= self._plan.steps:
            self._enough(self.record("steps"))

    def _held_by(self, optimizer: Optimizer) -> list[str]:
        return [self._names.get(id(p), "") for group in optimizer.param_groups for p in group["params"]]

    def _end_step(self, optimizer: Optimizer) -> None:
        if not self.counts():
            return
        if all(optimizer is not each for each in self._optimizers):
            self._optimizers.append(optimizer)
        number = next(i for i, each in enumerate(self._optimizers) if each is optimizer)
        others = {name for each in self._optimizers if each is not optimizer for name in self._held_by(each)}
        taken = {name: gradient for name, gradient in self._taken.items() if name not in others}
        window, self.window = self.window, Window()
        window.write(self._folder, self._world.rank, len(self.steps), taken)
        after = shards.digests_of(self.parameters)
        moved = [name for name, value in after.items() if self._before.get(name) != value]
        self._before = after
        of = [each for each in self._schedulers if optimizer_of(each) is optimizer]
        hidden = [name for name, p in self.parameters.items() if is_shard(p) and name not in self._shards]
        self.steps.append(
            StepSeen(
                number,
                [each.seen() for each in window.micro],
                [float(group["lr"]) for group in optimizer.param_groups],
                [int(each.last_epoch) for each in of],
                window.clips_seen(),
                window.cleared,
                window.scale,
                self._whole(after),
                moved,
                sorted(hooks.precisions(self._modules, self.parameters.values()) | window.dtypes),
                bool(hidden) or self._hides or self.flattened.hides,
                [*self._shards],
                sorted(window.computed),
                [name for name in self._held_by(optimizer) if name],
                [] if taken else window.computed_gradients(),
                window.calls,
                self._splits,
            )
        )
        if window.calls:
            self._closures.count(len(self.steps) - 1, window.calls, done=True)
        if len(self.steps) == 1:
            named = {plain(n): b.detach() for module in self._modules for n, b in module.named_buffers()}
            self._buffers = shards.digests_of({name: b for name, b in named.items() if not is_shard(b)})
