"""Guards of a training: a loss or gradient that is NaN or infinite (--on-nan), and replicas that differ.

Stopping at a NaN costs nothing: on a CPU a loss is there when the optimizer's step begins, and is looked at then; from
a GPU it arrives a few steps late (Meter). Leaving a step out takes a decision before the update, alike on all ranks:
each step then waits for the gradients, and for one all-reduce of one number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.data.fingerprint import gather_from_ranks
from samestep.data.schedule import Schedule
from samestep.errors import LostPeer, NotFinite, Refused, ReplicasDiffer, UserError, say
from samestep.job import Batch, MicroBatch
from samestep.message import Message, message
from samestep.rank.digests import bits_digest, copied_parameters, digests, places
from samestep.rank.parts import Part
from samestep.rank.shards import block_of
from samestep.rank.step import keep_state
from samestep.world import World

IN_A_ROW = 100  # the training ends after so many steps left out in a row: its weights, or all of its data, are bad
SAID = 10  # how many sentences tell of steps left out
LEAST = -(1 << 63)  # below every digest


def not_finite_in(tensors: list[Tensor]) -> Tensor:
    """Returns 1. where an element of these tensors is not finite, else 0."""
    bad = _not_finite(torch._foreach_norm(tensors, 2))
    # The squares of finite values may overflow: then the greatest magnitudes tell, which take ten times as long.
    return _not_finite(torch._foreach_norm(tensors, math.inf)) if bool(bad) else bad


def _not_finite(values: Sequence[Tensor]) -> Tensor:
    """Returns 1. where one of these numbers is not finite, else 0."""
    return (~torch.stack([value.double() for value in values]).isfinite()).any().float()


def is_finite(tensor: Tensor) -> bool:
    return bool(block_of(tensor).isfinite().all())


class StopsAtNaN(Part):
    """Ends the training with a sentence that names the step, the rank, its rows, and the first tensor that is bad."""

    def begin(self) -> None:
        """Registers the model. The losses of a step are looked at before the optimizer's step."""
        training = self.training
        named = training.model.named_parameters()
        # A frozen parameter may hold infinities, as a mask does.
        self._trained = [(name, p) for name, p in named if p.requires_grad and not p.is_meta]
        training.meter.not_finite = self._noticed
        training.optimizer.register_step_pre_hook(lambda *_: training.meter.check_losses())

    def end(self) -> None:
        """Raises NotFinite where the last update has left a weight that is not finite: no loss would show it."""
        name = _first(self._trained)
        if name:
            last = {"step": self.training.count.done - 1, "rank": self.training.world.rank}
            raise NotFinite(message("weight_not_finite_after_last_step", weight=name, **last))

    def _noticed(self, step: int, micro: int, loss: float) -> None:
        world = self.training.world
        raise NotFinite(
            message(
                "loss_not_finite",
                step=step,
                rank=world.rank,
                loss=str(loss),
                rows=rows_of(self.training.schedule, world.replica, step, micro),
                since=self._since(step),
            )
        )

    def _since(self, step: int) -> Message | None:
        """Returns which tensor is the first that is not finite, and since when; None where all are finite."""
        weight = _first(self._trained)
        if self.training.count.done > step:  # the loss is read late: the update has been made
            return message("weight_not_finite_by_now", weight=weight) if weight else None
        if weight:
            return message("weight_not_finite_before_the_step", weight=weight)
        gradient = _first((name, p.grad) for name, p in self._trained if p.grad is not None)
        return message("gradient_not_finite", parameter=gradient) if gradient else None


class SkipsNaN(Part):
    """Leaves the optimizer's step out, on all ranks alike, where one has a loss or gradient that is not finite.

    Such a step changes no weight, no state of the optimizer and no buffer. It counts as a step: rates move on.
    """

    def __init__(self) -> None:
        self._left_out = self._decided = False  # the step that is being taken
        self._losses: list[tuple[MicroBatch, Tensor]] = []
        self._restore: Callable[[], None] = lambda: None
        self._skipped = self._in_a_row = 0

    def begin(self) -> None:
        """Makes the optimizer's step one that may be left out. A scheduler does so too, to count the steps."""
        training = self.training
        training.meter.not_finite = lambda *_: None  # every step of such a loss is left out
        optimizer = training.optimizer
        step = optimizer.step
        names = {id(parameter): name for name, parameter in training.model.named_parameters()}

        def guarded(closure: Any = None, **settings: Any) -> Any:
            if closure is not None:
                raise Refused(message("engine_cannot_skip_steps", why=message("gradients_computed_inside_the_step")))
            self._decide(optimizer, names)
            if not self._left_out:
                return step(**settings)
            optimizer._opt_called = True  # otherwise a scheduler warns that it is called before the optimizer
            return None

        guarded._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # else it warns that the step is another
        optimizer.step = guarded

    def forward(self, micro_batch: MicroBatch) -> None:
        """Keeps the model's buffers, with which a step begins."""
        if micro_batch.micro == 0:
            self._restore = keep_state(self.training.model)
            self._decided = self._left_out = False
            self._losses = []
        self._micro_batch = micro_batch

    def loss(self, batch: Batch, loss: Tensor) -> None:
        """Takes in the loss of a micro-batch."""
        self._losses.append((self._micro_batch, loss.detach()))

    def stepped(self) -> None:
        """Says whether the step was left out. Raises Refused where the engine took it without the optimizer's step."""
        if not self._decided:
            why = message("weights_updated_without_the_optimizer")
            raise Refused(message("engine_cannot_skip_steps", why=why))
        self.training.left_out |= self._left_out

    def _decide(self, optimizer: Optimizer, names: dict[int, str]) -> None:
        if self._decided:  # Horovod's step calls the wrapped one
            return
        self._decided = True
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [g for g in (block_of(p.grad) for p in parameters) if g.numel()]
        bad = _not_finite([loss for _, loss in self._losses])
        if gradients:
            bad = torch.maximum(bad, not_finite_in(gradients))
        if self.training.world.size > 1:
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        self._left_out = bool(bad)
        self._in_a_row = self._in_a_row + 1 if self._left_out else 0
        if self._left_out:
            self._restore()
            self._say([(names.get(id(p), "a parameter"), p.grad) for p in parameters])

    def _say(self, gradients: list[tuple[str, Tensor]]) -> None:
        self._skipped += 1
        step = self._micro_batch.step
        if self._in_a_row == IN_A_ROW:
            raise UserError(message("all_latest_steps_skipped", count=IN_A_ROW, step=step))
        bad = next(((micro_batch, float(loss)) for micro_batch, loss in self._losses if not math.isfinite(loss)), None)
        world = self.training.world
        if self._skipped > SAID or (bad is None and world.rank):
            return
        if bad:
            micro_batch, loss = bad
            rows = rows_of(self.training.schedule, world.replica, step, micro_batch.micro)
            why = message("loss_not_finite_over_rows", loss=str(loss), rank=world.rank, rows=rows)
        elif parameter := _first(gradients):
            why = message("gradient_of_parameter_not_finite", parameter=parameter)
        else:
            why = message("some_gradient_not_finite")
        last = self._skipped == SAID
        say(message("step_skipped_and_later_ones_not_printed" if last else "step_skipped", step=step, why=why))


ON_NAN: dict[str, type[StopsAtNaN] | type[SkipsNaN]] = {"stop": StopsAtNaN, "skip": SkipsNaN}


@dataclass(frozen=True)
class Guards:
    """What a training looks for besides its progress: see RunTask.on_nan and check_replicas."""

    on_nan: Literal["stop", "skip"] = "stop"
    replicas: int = 0


def rows_of(schedule: Schedule, replica: int, step: int, micro: int) -> Message:
    """Returns which rows a micro-batch has, as a message."""
    micro_batch = schedule.step(replica, *schedule.place_of(step))[micro]
    rows = micro_batch.indices[: micro_batch.rows].tolist()
    if not rows:
        return message("rows_of_another_rank")
    return message("one_row", row=rows[0]) if len(rows) == 1 else message("rows", rows=rows, count=len(rows))


def _first(tensors: Iterable[tuple[str, Tensor | nn.Parameter]]) -> str | None:
    """Returns the name of the first tensor that is not finite."""
    return next((name for name, tensor in tensors if not is_finite(tensor)), None)


class ReplicaGuard(Part):
    """Compares the replicas every `every` steps, and at the end of the training."""

    def __init__(self, world: World, every: int) -> None:
        self.world, self.every = world, every
        self._checked = 0  # steps done at the latest check

    def counted(self) -> None:
        """Compares the replicas where it is time; the comparison counts for no step."""
        if self.world.size > 1 and self.training.count.done % self.every == 0:
            self.check(self.training.model, self.training.count.done)
            self.training.meter.resume()

    def end(self) -> None:
        """Compares the replicas after the last step."""
        self.check(self.training.model, self.training.count.done)

    def check(self, model: nn.Module, done: int) -> None:
        """Compares the replicas with one all-reduce of two numbers, and of two for each part into which a mesh divides
        the model. Every rank must call it alike.

        Where they differ, a rank that has drifted raises ReplicasDiffer and the others LostPeer; both name the first
        tensor.
        """
        if self.world.size == 1 or done == self._checked:
            return
        self._checked = done
        copied = copied_parameters(model, self.world)
        digest_of = {place: dict(zip(tensors, digests(tensors))) for place, tensors in copied.items()}
        greatest = torch.full((places(self.world), 2), LEAST, device=self.world.device)
        for place, of_tensors in digest_of.items():
            digest = int(bits_digest(torch.tensor([*of_tensors.values()], dtype=torch.int64)))
            greatest[place] = torch.tensor([digest, -digest])
        dist.all_reduce(greatest, dist.ReduceOp.MAX)
        if any(high not in (-low, LEAST) for high, low in greatest.tolist()):
            self._raise({name: digest for held in digest_of.values() for name, digest in held.items()}, done)

    def _raise(self, digest_of: dict[str, int], done: int) -> None:
        of_rank: list[dict[str, int]] = gather_from_ranks(digest_of, self.world)
        names = dict.fromkeys(name for digests_of_rank in of_rank for name in digests_of_rank)
        holding = {name: [rank for rank, held in enumerate(of_rank) if name in held] for name in names}
        differs = [name for name, ranks in holding.items() if len({of_rank[rank][name] for rank in ranks}) > 1]
        of_first = {rank: of_rank[rank][differs[0]] for rank in holding[differs[0]]}
        common = Counter(of_first.values()).most_common(1)[0][0]  # of two ranks the first one's
        odd = [rank for rank, digest in of_first.items() if digest != common]
        said = message(
            "replicas_differ",
            step=done - 1,
            parameter=differs[0],
            ranks=odd,
            differing=len(differs),
            parameters=len(names),
        )
        raise ReplicasDiffer(said) if self.world.rank in odd else LostPeer(said, odd)
