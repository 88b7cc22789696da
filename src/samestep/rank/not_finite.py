"""What a training does at a loss or gradient that is NaN or infinite (--on-nan): it stops, or leaves the step out.

Stopping costs nothing: on a CPU a loss is there when the optimizer's step begins, and is looked at then; from a GPU it
arrives a few steps late (Meter). Leaving a step out takes a decision before the update, alike on all ranks: each step
then waits for the gradients, and for one all-reduce of one number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.data.schedule import Schedule
from samestep.errors import NotFinite, Refused, UserError, first_few, say
from samestep.job import Job, MicroBatch
from samestep.message import Message
from samestep.rank.meter import Meter
from samestep.rank.shards import block_of
from samestep.world import World

IN_A_ROW = 100  # steps left out in a row, after which the training ends: its weights, or all of its data, are bad
SAID = 10  # sentences about steps left out


def is_finite(tensor: Tensor) -> bool:
    return bool(block_of(tensor).isfinite().all())


class StopsAtNaN:
    """Ends the training with a sentence that names the step, the rank, its rows, and the first tensor that is bad."""

    left_out = False  # no step is

    def __init__(self, schedule: Schedule, world: World, meter: Meter) -> None:
        self.schedule, self.world, self.meter = schedule, world, meter
        self.done = 0  # steps
        self._trained: list[tuple[str, nn.Parameter]] = []  # a frozen one may hold infinities, as a mask does
        meter.not_finite = self._noticed

    def begin(self, model: nn.Module, optimizer: Optimizer, first: int) -> None:
        """Registers the model. The losses of a step are looked at before the optimizer's step. first: steps done."""
        self.done = first
        self._trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        optimizer.register_step_pre_hook(lambda *_: self.meter.check_losses())

    def before(self, micro_batch: MicroBatch, keep: Callable[[], Callable[[], None]]) -> None:
        """Does nothing. See SkipsNaN."""

    def loss(self, loss: Tensor) -> None:
        """Does nothing: the meter has the loss."""

    def stepped(self) -> None:
        """Counts a step."""
        self.done += 1

    def end(self) -> None:
        """Raises NotFinite where the last update has left a weight that is not finite: no loss would show it."""
        name = _first(self._trained)
        if name:
            raise NotFinite(
                f"{name} is not finite after the last step, {self.done - 1}, on rank {self.world.rank}: "
                f"that step's loss was finite, its gradient was not; {ADVICE}"
            )

    def _noticed(self, step: int, micro: int, loss: float) -> None:
        rows = rows_of(self.schedule, self.world.rank, step, micro)
        where = f"at step {step} on rank {self.world.rank}: {loss}, over {rows}"
        raise NotFinite(f"the loss is not finite {where}{self._tensor(step)}; {ADVICE}")

    def _tensor(self, step: int) -> str:
        """Names the first tensor that is not finite, and says since when."""
        weight = _first(self._trained)
        if self.done > step:  # it is read late: the update has been made
            return f"; by now {weight} is not finite" if weight else ""
        if weight:
            return f"; {weight} was not finite before it: the gradient of an earlier step was not, though its loss was"
        gradient = _first((name, p.grad) for name, p in self._trained if p.grad is not None)
        return f"; the first gradient that is not finite is that of {gradient}" if gradient else ""


class SkipsNaN:
    """Leaves the optimizer's step out, on all ranks alike, where one has a loss or gradient that is not finite.

    Such a step changes no weight, no state of the optimizer and no buffer. It counts as a step: rates move on.
    """

    def __init__(self, schedule: Schedule, world: World, meter: Meter) -> None:
        self.schedule, self.world = schedule, world
        self.left_out = False  # the step that is being taken
        self._decided = False
        self._losses: list[tuple[MicroBatch, Tensor]] = []
        self._restore: Callable[[], None] = lambda: None
        self._skipped = self._in_a_row = 0
        meter.not_finite = lambda *_: None  # every step of such a loss is left out

    def begin(self, model: nn.Module, optimizer: Optimizer, first: int) -> None:
        """Makes the optimizer's step one that may be left out. A scheduler does so too, to count the steps."""
        step = optimizer.step
        names = {id(parameter): name for name, parameter in model.named_parameters()}

        def guarded(closure: Any = None, **settings: Any) -> Any:
            if closure is not None:
                raise Refused(CANNOT.format("it computes the gradients inside the optimizer's step"))
            self._decide(optimizer, names)
            if not self.left_out:
                return step(**settings)
            optimizer._opt_called = True  # type: ignore[attr-defined]  # else a scheduler warns that it comes first
            return None

        guarded._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # else it warns that the step is another
        optimizer.step = guarded  # type: ignore[method-assign]

    def before(self, micro_batch: MicroBatch, keep: Callable[[], Callable[[], None]]) -> None:
        """Begins a micro-batch. keep: keeps the model's buffers, and returns what restores them."""
        if micro_batch.micro == 0:
            self._restore, self._decided, self.left_out = keep(), False, False
            self._losses = []
        self._micro_batch = micro_batch

    def loss(self, loss: Tensor) -> None:
        """Takes in the loss of a micro-batch."""
        self._losses.append((self._micro_batch, loss.detach()))

    def stepped(self) -> None:
        """Ends a step. Raises Refused where the engine took it without the optimizer's step."""
        if not self._decided:
            raise Refused(CANNOT.format("it updates the weights without the optimizer's step"))

    def end(self) -> None:
        """Does nothing: no weight has taken in a gradient that is not finite."""

    def _decide(self, optimizer: Optimizer, names: dict[int, str]) -> None:
        if self._decided:  # Horovod's step calls the wrapped one
            return
        self._decided = True
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [g for g in (block_of(p.grad) for p in parameters) if g.numel()]
        values = [loss.double() for _, loss in self._losses]
        # The greatest magnitude: a norm of finite values might overflow.
        values += [norm.double() for norm in torch._foreach_norm(gradients, math.inf)] if gradients else []
        bad = (~torch.stack(values).isfinite()).any().float()
        if self.world.size > 1:
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        self.left_out = bool(bad)
        self._in_a_row = self._in_a_row + 1 if self.left_out else 0
        if self.left_out:
            self._restore()
            self._say([(names.get(id(p), "a parameter"), p.grad) for p in parameters])

    def _say(self, gradients: list[tuple[str, Tensor]]) -> None:
        self._skipped += 1
        step = self._micro_batch.step
        if self._in_a_row == IN_A_ROW:
            raise UserError(
                f"the {IN_A_ROW} steps up to step {step} were all left out (--on-nan skip): no loss or gradient is "
                f"finite any more; {ADVICE}"
            )
        mine = next(((micro_batch, float(loss)) for micro_batch, loss in self._losses if not math.isfinite(loss)), None)
        if self._skipped > SAID or (mine is None and self.world.rank):
            return
        if mine:
            rows = rows_of(self.schedule, self.world.rank, step, mine[0].micro)
            why = f"its loss is {mine[1]} on rank {self.world.rank}, over {rows}"
        else:
            why = f"the gradient of {_first(gradients) or 'some parameter'} is not finite"
        say(f"step {step} is left out: {why}{'; later ones are not printed' if self._skipped == SAID else ''}")


OnNaN: dict[str, type[StopsAtNaN] | type[SkipsNaN]] = {"stop": StopsAtNaN, "skip": SkipsNaN}
ADVICE = "lower the learning rate (--set lr=…), look at the data of that step, or leave such steps out: --on-nan skip"
CANNOT = "--on-nan skip: this engine cannot leave a step out: {}; use --on-nan stop, or another engine, such as ddp"


def check_can_skip(job: Job, cannot_skip: str | Message) -> None:
    """Raises Refused for a job, and for an engine, that cannot leave a step out.

    cannot_skip: why the engine cannot, as it declares; '': it can.
    """
    if cannot_skip:
        raise Refused(CANNOT.format(cannot_skip))
    if job.optimizer.needs_closure:
        raise Refused(
            f"--on-nan skip: {job.optimizer.cls.__name__} computes the gradients inside its step; leave skip out"
        )
    if job.carry_state:
        raise Refused("--on-nan skip: the state that Job(carry_state) hands to the next step is not finite either")


@dataclass(frozen=True)
class Checks:
    """What a training looks for besides its progress: see RunTask.on_nan and check_replicas."""

    on_nan: Literal["stop", "skip"] = "stop"
    replicas: int = 0


def rows_of(schedule: Schedule, rank: int, step: int, micro: int) -> str:
    """Returns 'rows 12, 7, 3, 40 … (8 rows)', those of a micro-batch, in words."""
    micro_batch = schedule.step(rank, *divmod(step, schedule.steps_per_epoch))[micro]
    rows = [str(row) for row in micro_batch.indices[: micro_batch.rows]]
    if not rows:
        return "no rows of its own: it computes those of another rank with a weight of 0"
    return f"row {rows[0]}" if len(rows) == 1 else f"rows {first_few(rows)} ({len(rows)} rows)"


def _first(tensors: Iterable[tuple[str, Tensor | nn.Parameter]]) -> str | None:
    """Returns the name of the first tensor that is not finite."""
    return next((name for name, tensor in tensors if not is_finite(tensor)), None)
