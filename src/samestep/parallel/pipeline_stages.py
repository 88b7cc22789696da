"""The stages of a pipeline on one rank: which they are, what they send, and which part of the model this rank has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from samestep.errors import Refused
from samestep.job import Batch
from samestep.message import message
from samestep.parallel.plan_trial import fresh, laid_out
from samestep.parallel.recorded_forward import tensors_of
from samestep.parallel.stage_forward import (
    Absent,
    StageForward,
    StageOutput,
    absent_tensors,
    leave_absent,
    sizes_at,
    tensors_in,
    without,
)
from samestep.parallel.stage_plan import StagePlan
from samestep.rank.absent_modules import Outputs
from samestep.rank.shards import divide_along, gather_absent
from samestep.rank.step import default_generator
from samestep.rank.threaded_group import alike_on_ranks

MeanLoss = Callable[[nn.Module, Batch], Tensor]  # of the rows of a micro-batch, as Run.mean_loss


class DividedModel:
    """A model of which this rank keeps what its stages use.

    rank_of: of each stage, the place along the stage axis of the rank that has it. place: this rank's.
    """

    def __init__(self, model: nn.Module, plan: StagePlan, rank_of: Sequence[int], *, place: int, device: str) -> None:
        self.model, self.plan, self.rank_of, self.place, self.device = model, plan, rank_of, place, device
        self.stages = [stage for stage, rank in enumerate(rank_of) if rank == place]
        names = {id(tensor): name for name, tensor in tensors_of(model)}
        self._holders = {name: sorted({rank_of[stage] for stage in plan.holders[name]}) for name in names.values()}
        every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self._owners = {name: self._holders[names[id(tensor)]][0] for name, tensor in every}
        leave_absent(model, lambda tensor: place in self._holders[names[id(tensor)]])
        self.note_stages()

    def note_stages(self) -> None:
        """Notes which parameters other ranks have instead of this one, or as well."""
        for name, parameter in self.model.named_parameters():
            divide_along(parameter, "stage", copied=self._holders[name][0] != self.place)

    @property
    def copies(self) -> dict[str, list[int]]:
        """Name -> the ranks that have a copy, of the tied parameters that several ranks have."""
        return {name: self._holders[name] for name, _ in self.model.named_parameters() if len(self._holders[name]) > 1}

    def owned(self) -> list[nn.Parameter]:
        """Returns this rank's parameters, but for copies of an earlier rank's."""
        return [p for name, p in self.model.named_parameters() if self._holders[name][0] == self.place]

    def parameters_of(self, stage: int) -> list[nn.Parameter]:
        """Returns the parameters that a stage uses."""
        return [p for name, p in self.model.named_parameters() if stage in self.plan.holders[name]]

    def absent_in(self, stage: int) -> list[Absent]:
        """Returns what stands for this rank's tensors that only its other stages use."""
        used = {id(tensor) for name, tensor in tensors_of(self.model) if stage in self.plan.holders[name]}
        return absent_tensors(self.model, lambda tensor: id(tensor) in used)

    def gather_state(self, group: dist.ProcessGroup) -> None:
        """Lets the model's state_dict(), which all ranks of the replica must call, have the tensors of all stages."""
        gather_absent(self.model, self._owners, group=group, device=self.device)


@dataclass(frozen=True)
class KnownShapes:
    """The remembered facts about tensors without values: the results of absent modules; and by the shapes of a
    micro-batch, the shape and dtype of each tensor that is sent at each cut."""

    outputs: Outputs = field(default_factory=Outputs)
    sent: dict[str, list[list[tuple[torch.Size, torch.dtype]]]] = field(default_factory=dict)


known_shapes = alike_on_ranks(KnownShapes)


class StageModule(nn.Module):
    """The module that torch's schedule calls for one stage, with the number of a micro-batch and the tensors that the
    stage before sends.

    It returns what the next stage receives, in flat tensors of one size for all micro-batches; the last stage returns
    the micro-batch's part of the step's loss. Random numbers continue where the stage before has stopped.
    """

    def __init__(self, divided: DividedModel, stage: int, mean_loss: MeanLoss, outputs: Outputs) -> None:
        super().__init__()
        self.parameters_of_stage = nn.ParameterList(divided.parameters_of(stage))
        plan = divided.plan
        self.stage, self.draws, self.device = stage, plan.draws, divided.device
        self.receives = plan.cuts[stage - 1] if stage else None
        self.sends = plan.cuts[stage] if stage < len(plan.cuts) else None
        self._part = StageForward(
            divided.model,
            stage,
            self.receives.module if self.receives else None,
            self.sends.module if self.sends else None,
            device=self.device,
            received=self.receives.leaves if self.receives else None,
            outputs=outputs,
        )
        self._mean_loss = partial(mean_loss, divided.model)
        self._of_other_stages = divided.absent_in(stage)
        self.batches: Sequence[Batch] = ()
        self.sizes: Sequence[int] = ()  # of the flat tensors that are sent
        self.losses: dict[int, Tensor] = {}  # of the last stage, by the number of the micro-batch
        self.before_reduction: Callable[[], None] = lambda: None  # of the gradients of a sharded stage

    def forward(self, *received: Tensor, number: Tensor) -> Tensor | tuple[Tensor, ...]:
        batch = self.batches[int(number)]
        generator = default_generator(self.device)

        def receive(absent: Mapping[int, Tensor]) -> dict[int, Tensor]:
            if self.draws:
                generator.set_state(received[-1].cpu())
            assert self.receives
            tensors = {}
            for (leaf, like), values, order in zip(absent.items(), received, self.receives.orders):
                # Cloned as in the trial: a module may change its input in place.
                tensors[leaf] = laid_out(values[: like.numel()].view(like.shape), order).clone()
            return tensors

        try:
            with without(self._of_other_stages):
                loss: Tensor = self._part.run(partial(self._mean_loss, batch), receive)
        except StageOutput as output:
            assert self.sends
            sent = tensors_in(output.leaves, self.sends.leaves, self.sends.module)
            return self._sent([*sent.values()], generator)
        self.losses[int(number)] = loss.detach()
        # A placeholder for torch, which expects float32, and reads no value.
        return (loss * batch.micro_batch.share).float()

    def _sent(self, tensors: Sequence[Tensor], generator: torch.Generator) -> tuple[Tensor, ...]:
        sent = []
        for tensor, size in zip(tensors, self.sizes):
            if tensor.numel() > size:
                raise Refused(message("stage_sends_more_than_expected", stage=self.stage))
            sent.append(F.pad(tensor.reshape(-1), (0, size - tensor.numel())))
        if self.draws:
            sent.append(generator.get_state().to(self.device))
        return tuple(sent)


class Stage(PipelineStage):
    """A stage as torch's schedules call it."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        module: Any = self.submod
        module.before_reduction()
        super().perform_reduce_grad(grad_scale_factor)


class Pipeline:
    """torch's pipeline schedule over the stages of a replica's ranks, for the micro-batches of one step at a time."""

    def __init__(
        self,
        divided: DividedModel,
        mean_loss: MeanLoss,
        output: Callable[[nn.Module, Batch], Any],
        *,
        schedule: str,
        micro_batches: int,
        group: dist.ProcessGroup,
    ) -> None:
        self.divided, self.device = divided, divided.device
        self._output, self._name, self._micro_batches, self._group = output, schedule, micro_batches, group
        self._shapes = known_shapes()
        self.modules = [StageModule(divided, stage, mean_loss, self._shapes.outputs) for stage in divided.stages]
        self._modules = {module.stage: module for module in self.modules}
        self._sizes: list[list[tuple[int, torch.dtype]]] = []  # of what is sent at each cut
        self._known: set[str] = set()
        self._schedule: Any = None

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """Computes the gradients of a step. Returns the mean loss of each micro-batch, on every rank of the replica."""
        if self._grow(batches) or self._schedule is None:
            self._build()
        numbers = torch.arange(len(batches))
        copied = self.divided.plan.changes_rows
        for place, module in enumerate(self._modules.values()):
            module.batches, module.losses = [*map(fresh, batches)] if copied and place else batches, {}
        last = len(self.divided.rank_of) - 1
        first_input = (numbers,) if 0 in self._modules else ()
        target = numbers if last in self._modules else None
        try:
            self._schedule.step(*first_input, target=target, return_outputs=False, number=numbers)
        except RuntimeError as error:  # torch's, which says no more than in which stage
            raise error.__cause__ or error from None
        losses = torch.zeros(len(batches), dtype=torch.float64, device=self.device)
        if last in self._modules:
            for number, loss in self._modules[last].losses.items():
                losses[number] = loss
        dist.broadcast(losses, group=self._group, group_src=self.divided.rank_of[last])
        return losses

    def _grow(self, batches: Sequence[Batch]) -> bool:
        """Returns whether a micro-batch needs larger buffers than those before."""
        before, model = [list(sizes) for sizes in self._sizes], self.divided.model
        cuts = self.divided.plan.cuts
        for batch in batches if cuts else ():
            shapes = str([tuple(leaf.shape) for leaf in tree_leaves(batch.data) if isinstance(leaf, Tensor)])
            if shapes in self._known:
                continue
            self._known.add(shapes)
            leaves = {cut.module: cut.leaves for cut in cuts}
            batch = fresh(batch) if self.divided.plan.changes_rows else batch
            if shapes not in self._shapes.sent:
                output = partial(self._output, model, batch)
                self._shapes.sent[shapes] = sizes_at(output, model, leaves, self.device, self._shapes.outputs)
            found = self._shapes.sent[shapes]
            sizes = [[(shape.numel(), dtype) for shape, dtype in tensors] for tensors in found]
            self._sizes = [[max(pair) for pair in zip(*cut)] for cut in zip(self._sizes, sizes)] or sizes
        return self._sizes != before

    def _build(self) -> None:
        """Makes torch's schedule. The sizes of what is sent are given: torch would find them by a forward pass more."""
        count = len(self.divided.rank_of)
        stages = []
        for stage, module in self._modules.items():
            if module.sends:
                module.sizes = [size for size, _ in self._sizes[stage]]
            given = self._examples(stage - 1) if stage else (torch.zeros(1, dtype=torch.int64),)
            returned = self._examples(stage) if stage < count - 1 else (torch.zeros(()),)
            device = torch.device(self.device)
            stages.append(Stage(module, stage, count, device, given, returned, group=self._group))
        made: Any = get_schedule_class(self._name)
        several = issubclass(made, PipelineScheduleMulti)
        # The micro-batches' losses have their shares of the step already, and add up.
        self._schedule = made(
            stages if several else stages[0], self._micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False
        )

    def _examples(self, number: int) -> tuple[Tensor, ...]:
        """Returns tensors like those that are sent at a cut."""
        cut = self.divided.plan.cuts[number]
        examples = [
            torch.empty(size, dtype=dtype, device=self.device, requires_grad=needs_grad)
            for (size, dtype), needs_grad in zip(self._sizes[number], cut.needs_grad)
        ]
        if self.divided.plan.draws:
            examples.append(default_generator(self.device).get_state().to(self.device))
        return tuple(examples)
