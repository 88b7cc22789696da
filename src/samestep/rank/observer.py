"""Observes what only the proof needs of a training: rows, learning rates, optimizer steps, and sums of its state.

The sums show whether a continued training begins with the same state. They are read from the live model and optimizer,
and share with the checkpoints that they check only where a shard lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path

from samestep.data.schedule import Schedule
from samestep.job import Batch, MicroBatch
from samestep.job.phases import CHECKPOINTED
from samestep.rank.digests import copied_parameters, digest_rows, digests, divided_at, state_digests
from samestep.rank.parts import Part
from samestep.rank.row_order import row_orders
from samestep.rank.shards import block_of, is_shard, place_of, sharded_like
from samestep.rank.weights import Ema
from samestep.records.training_record import MicroBatchRecord, TensorRecord
from samestep.world import World


class StateOf:
    """The state of one training on this rank."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def sums(self, ema: Ema | None, stateful: Mapping[str, Any]) -> dict[str, TensorRecord]:
        """Returns the sums of 'weights of NAME', 'KEY of NAME' of the optimizer, 'average of NAME', 'buffer NAME', and
        'PART KEY' of the others, name -> what has a state dict. 'optimizer of NAME' is empty: NAME may have a state.
        """
        sums = {name: _sums(tensor, order) for name, (tensor, order) in self._tensors(ema) if not tensor.is_meta}
        for part, of_part in stateful.items():
            for path, value in tree_flatten_with_path(of_part.state_dict())[0] if of_part is not None else ():
                if isinstance(value, Tensor | int | float) and not isinstance(value, bool):
                    sums[f"{part} {keystr(path)}"] = _sums(torch.as_tensor(value))
        return sums

    def buffers(self) -> dict[str, TensorRecord]:
        """Returns the sums of each 'buffer NAME'."""
        return {f"buffer {name}": _sums(buffer) for name, buffer in self.model.named_buffers() if not buffer.is_meta}

    def _tensors(self, ema: Ema | None) -> Iterator[tuple[str, tuple[Tensor, Tensor | None]]]:
        """Yields the name of a tensor, and the tensor with the order of its rows, as row_orders() says."""
        orders = row_orders(self.model)
        named = {name.replace(CHECKPOINTED, ""): parameter for name, parameter in self.model.named_parameters()}
        names = {id(parameter): name for name, parameter in named.items()}
        for name, parameter in named.items():
            yield f"weights of {name}", (parameter, orders.get(name))
        for name, buffer in self.model.named_buffers():
            yield f"buffer {name}", (buffer, None)
        inner: Any = getattr(self.optimizer, "optim", None)  # ZeRO's, which has this rank's part of the state
        optimizer = inner if isinstance(inner, Optimizer) else self.optimizer
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            name = names.get(id(parameter), "")
            if not name or parameter.is_meta:
                continue  # libraries may replace the parameters by flat copies; another rank has this stage
            yield f"optimizer of {name}", (torch.empty(0), None)
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor | int | float):
                    of_rows = isinstance(value, Tensor) and value.shape == parameter.shape
                    yield f"{key} of {name}", (torch.as_tensor(value), orders.get(name) if of_rows else None)
        for name, average, parameter in ema.named(self.model) if ema else ():
            average_tensor = sharded_like(average, parameter) if is_shard(parameter) else average
            yield f"average of {name}", (average_tensor, orders.get(name))


def _sums(tensor: Tensor, order: Tensor | None = None) -> TensorRecord:
    """Returns the sums over this rank's piece of a tensor. No rank asks another. order: of its rows."""
    block = block_of(tensor)
    place = torch.zeros((), dtype=torch.float64, device=block.device)
    _, offset = place_of(tensor)
    step = tensor.numel()
    for dim, (size, length, first) in enumerate(zip(tensor.shape, block.shape, offset)):
        step //= max(1, size)
        index = torch.arange(first, first + length, dtype=torch.float64, device=block.device)
        if dim == 0 and order is not None:
            index = order[first : first + length].to(index)
        place = place.unsqueeze(-1) + index * step
    values = block.to(torch.float64).nan_to_num()
    mixed = float((values * torch.cos(place)).sum())
    return TensorRecord(block.numel(), tensor.numel(), float(values.abs().sum()), mixed)


LATER_EPOCHS = (2, 3, 97)  # epochs that the proof does not train; it compares the rows that they would read


class Observer(Part):
    """What the proof observes of one training on this rank. Never while measuring: digests take time."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.micro_batches: list[MicroBatchRecord] = []  # of each micro-batch
        self.rates: list[list[float]] = []  # of each optimizer step, one for each parameter group
        self.start_digests: list[str] = []
        self.end_digests: dict[str, int] = {}  # of each parameter that this rank holds whole
        self.divided: dict[str, dict[str, int]] = {}  # as of TrainingRecord
        self.autocast = False
        self._depth, self._stepping = 0, set[int]()
        self._state_of: StateOf | None = None
        self.state: dict[str, TensorRecord] = {}
        self._buffers: dict[str, TensorRecord] = {}

    def begin(self) -> None:
        """Takes the first weights' digests, and watches the optimizer's steps."""
        self.watch(self.training.model, self.training.optimizer)

    def watch(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.start_digests = state_digests(model)
        self._state_of = StateOf(model, optimizer)
        # The rate is read after the step: before it, libraries that accumulate show the next step's rate.
        optimizer.register_step_pre_hook(lambda *_: self._before_optimizer_step())
        optimizer.register_step_post_hook(lambda o, *_: self._after_optimizer_step(o))

    def _before_optimizer_step(self) -> None:
        self._depth += 1

    def _after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Records the learning rates of one optimizer step.

        Horovod's step() calls the wrapped optimizer's: only the outer call counts. DeepSpeed calls step() once for each
        parameter group, with the others empty: calls on groups that have not stepped yet belong to the same step.
        """
        self._depth -= 1
        if self._depth:
            return
        full = [group for group in optimizer.param_groups if group["params"]]
        groups = {id(group) for group in full}
        if self._stepping & groups or not self.rates:
            self.rates.append([])
            self._stepping = set()
        self._stepping |= groups
        self.rates[-1] += [float(group["lr"]) for group in full]

    def step_begins(self) -> None:
        count = self.training.count
        if count.first and count.done == count.first:
            self.note_buffers()

    def averages_begin(self) -> None:
        if self.training.count.first and not self.state:
            self._note_training()

    def stopped(self) -> None:
        self._note_training()

    def _note_training(self) -> None:
        stateful = {**self.training.stateful, "carried state": self.training.carried}
        self.note_state(self.training.ema, stateful)

    def note_buffers(self) -> None:
        """Describes the buffers for the next note_state(), which may come late for them.

        Lightning computes the first loss inside DDP's forward pass, which has given rank 0's buffers to all by then.
        """
        assert self._state_of
        self._buffers = self._state_of.buffers()

    def note_state(self, ema: Ema | None, stateful: Mapping[str, Any]) -> None:
        """Describes the weights, the optimizer's state and all else as they are now. stateful: as Training.stateful."""
        assert self._state_of
        self.state = self._state_of.sums(ema, stateful) | self._buffers
        self._buffers = {}

    def forward(self, micro_batch: MicroBatch) -> None:
        """Notes whether the forward pass that begins is in autocast."""
        self.autocast |= torch.is_autocast_enabled(self.world.device.partition(":")[0])

    def loss(self, batch: Batch, loss: Tensor) -> None:
        """Records the rows of a micro-batch."""
        micro_batch = batch.micro_batch
        rows, digests = micro_batch.indices[: micro_batch.rows].tolist(), digest_rows(batch.data, micro_batch.rows)
        self.micro_batches.append(
            MicroBatchRecord(micro_batch.epoch, micro_batch.step, micro_batch.micro, rows, micro_batch.weight, digests)
        )

    def end(self) -> None:
        """Takes the digests of the last weights."""
        model = self.training.model
        copied = copied_parameters(model, self.world)
        parameters = {name: tensor for tensors in copied.values() for name, tensor in tensors.items()}
        self.end_digests = dict(zip(parameters, digests(parameters)))
        if self.world.mesh:
            named = {name: parameter for name, parameter in model.named_parameters() if not parameter.is_meta}
            self.divided = {name: place for name, p in named.items() if (place := divided_at(p, self.world))}

    def rows_of_later_epochs(self, schedule: Schedule) -> dict[int, list[int]]:
        """Returns epoch -> this rank's rows in the epoch's first step."""
        # Without weights: rows that all weigh 0 raise an error, and the proof does not train these epochs.
        schedule = replace(schedule, weight=None)
        of_epoch = {epoch: schedule.step(self.world.replica, epoch, 0) for epoch in LATER_EPOCHS}
        return {
            epoch: [i for p in micro_batches for i in p.indices[: p.rows].tolist()]
            for epoch, micro_batches in of_epoch.items()
        }
