"""How the ranks of a pipeline divide a model: with which of its modules each stage begins.

A plan is what Job(parallel=…) says, or the model's repeated blocks, so divided that the stages have as much to compute
as each other: the floating-point operations of a forward pass, which are the same on every rank, as times are not. It
is tried in one process before any rank starts: the stages, one after the other and with nothing but their own
parameters, must give the loss and the gradients of the whole model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from samestep.bounds import DIVIDED_GRADIENT, DIVIDED_ROWS_APART
from samestep.data.schedule import schedule_of
from samestep.errors import Refused, UserError, nearest_name
from samestep.job import Batch, Job
from samestep.message import Message, message
from samestep.parallel.copied_modules import Unchanged, copied_module
from samestep.parallel.plan_trial import Trial, fresh, is_close, memory_order, rounding_of, tried
from samestep.parallel.recorded_forward import Call, RecordedForward, tensors_of
from samestep.parallel.stage_forward import Absent, StageForward, StageOutput, absent_tensors, sizes_at, without
from samestep.rank.absent_modules import Outputs
from samestep.rank.job_errors import raising
from samestep.rank.threaded_group import alike_on_ranks
from samestep.world.foreign_code import error_line

STAGE = "stage"  # in Job.parallel: a stage begins with this module
# schedule of torch.distributed.pipelining -> the stages of a rank: 'one', 'v' (the first and the last, the second and
# the last but one, …) or 'loop' (as many as stages_per_rank says, as many ranks apart)
SCHEDULES = {
    "GPipe": "one",
    "1F1B": "one",
    "Interleaved1F1B": "loop",
    "InterleavedZeroBubble": "loop",
    "LoopedBFS": "loop",
    "ZBVZeroBubble": "v",
    "DualPipeV": "v",
}
ROWS = 2  # of the batch on which a plan is tried: the fewest that BatchNorm accepts
SEED, OTHER_SEEDS = 11, (12, 13, 14)
# A loss or a gradient that is not finite shows nothing of the stages.
_close = partial(is_close, tolerance=DIVIDED_ROWS_APART, finite=True)


@dataclass(frozen=True)
class Cut:
    """Where a stage begins: the name of a module, and which leaves of its arguments the stage before sends.
    needs_grad: of each of these, whether a gradient is sent back. orders: of each, how its dimensions lie in memory."""

    module: str
    leaves: tuple[int, ...] = ()
    needs_grad: tuple[bool, ...] = ()
    orders: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class StagePlan:
    """Where the stages begin, but for the first one. holders: the name of a parameter or buffer -> the stages that use
    it. draws: whether random numbers are drawn after the first stage, as by dropout. changes_rows: whether the forward
    pass changes its rows in place, so that each stage needs rows of its own."""

    cuts: tuple[Cut, ...]
    holders: Mapping[str, tuple[int, ...]]
    draws: bool
    changes_rows: bool = False

    @property
    def stages(self) -> int:
        return len(self.cuts) + 1

    @property
    def sends_without_gradient(self) -> bool:
        """Whether a stage sends tensors that get no gradient: integers, or the state of random numbers."""
        return bool(self.cuts) and (self.draws or not all(needs for cut in self.cuts for needs in cut.needs_grad))

    def said(self, model: nn.Module, ranks: int) -> Message:
        """Returns how the model is divided, for the user to read."""
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        held = [
            sum(size for name, size in sizes.items() if stage in self.holders[name]) for stage in range(self.stages)
        ]
        begins = [cut.module for cut in self.cuts]
        if not begins:
            return message("pipeline_is_whole")
        tied = [name for name in sizes if len(self.holders[name]) > 1]
        fields = {"begins": ", ".join(begins), "held": ", ".join(f"{size:,}" for size in held), "tied": tied or None}
        return message("pipeline_ranks_divide_the_model", ranks=ranks, stages=self.stages, **fields)


def ranks_of_stages(schedule: str, ranks: int, stages_per_rank: int) -> list[int]:
    """Returns the rank that has each stage, of `ranks` ranks. Raises UserError for an unknown schedule."""
    if schedule not in SCHEDULES:
        hint = nearest_name(schedule, [*SCHEDULES])
        raise UserError(message("pipeline_has_no_such_schedule", schedule=schedule, hint=hint))
    if SCHEDULES[schedule] == "one":
        return [*range(ranks)]
    if SCHEDULES[schedule] == "v":
        return [*range(ranks), *reversed(range(ranks))]
    if stages_per_rank < 2:
        raise UserError(message("schedule_needs_several_stages_per_rank", schedule=schedule, stages=stages_per_rank))
    return [*range(ranks)] * stages_per_rank


def check_micro_batches(job: Job, schedule: str, rank_of: Sequence[int], *, replicas: int, fewest: int) -> None:
    """Raises Refused where the micro-batches of a step are too many for its rows, or a number that a schedule does not
    take. rank_of: as ranks_of_stages() returns it. fewest: as of Layout.micro_batches."""
    if fewest < 1:
        raise UserError(message("micro_batches_per_step", micro_batches=fewest))
    if job.carry_state:
        raise Refused(message("pipeline_carries_no_state"))
    ranks, stages = max(rank_of) + 1, len(rank_of)
    rows, count = job.global_batch // replicas, replace(schedule_of(job, replicas), fewest=fewest).micro_batches
    if count > rows:
        raise Refused(message("more_micro_batches_than_rows", micro_batches=count, rows=rows))
    if schedule in ("1F1B", "DualPipeV") and count < stages:
        raise Refused(message("fewer_micro_batches_than_stages", schedule=schedule, micro_batches=count, stages=stages))
    rounds = max(1, count // ranks)
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and count % rounds:
        fields = {"schedule": schedule, "micro_batches": count, "ranks": ranks}
        raise Refused(message("micro_batches_do_not_divide", **fields))


@alike_on_ranks
def stage_plan(job: Job, stages: int, device: str = "cpu") -> StagePlan:
    """Returns where `stages` stages of the job's model begin. Raises Refused, or UserError for a mistake in
    Job.parallel, where the model cannot be divided so."""
    with torch.random.fork_rng():
        trial = tried(job, ROWS, device, partial(StageTrial, job, device))
        for name, module in trial.model.named_modules():
            if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
                raise Refused(message("compiled_model_is_not_cut", module=name or type(module).__name__))
        begins = _begins(job, trial, stages)
        return trial.plan(begins)


def _begins(job: Job, trial: StageTrial, stages: int) -> list[str]:
    given = [name for name, style in (job.parallel or {}).items() if style == STAGE]
    if given:
        return _given(given, trial, stages)
    blocks = trial.blocks(stages)
    if len(blocks) < stages:
        varying = [name for name in dict.fromkeys(trial.called) if name in trial.varying]
        fields = {"stages": stages, "blocks": len(blocks), "names": blocks or None, "varying": varying or None}
        raise Refused(message("more_stages_than_blocks", **fields))
    return [blocks[first] for first in balanced(trial.operations(blocks), stages)]


def balanced(costs: Sequence[int], stages: int) -> list[int]:
    """Returns with which of the consecutive parts that have these costs each stage begins, but for the first: the sum
    of the squares of the stages' costs is the least. Equal ones are divided evenly."""
    # Where stages have nothing to compute, the parts are counted instead.
    before = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=np.float64) + sum(costs) * 1e-6 + 1e-3)])
    least = before**2  # of one stage, that has the parts before each
    chosen = []
    for _ in range(1, stages):
        sums = least[None, :] + (before[:, None] - before[None, :]) ** 2
        sums[np.triu_indices(len(before))] = np.inf  # a stage has a part at least
        sums[:, 0] = np.inf
        chosen.append(sums.argmin(1))
        least = sums.min(1)
    begins, end = list[int](), len(costs)
    for first in reversed(chosen):
        end = int(first[end])
        begins.insert(0, end)
    return begins


def _given(patterns: Sequence[str], trial: StageTrial, stages: int) -> list[str]:
    names = [name for name, _ in trial.model.named_modules() if name]
    begins = []
    for pattern in patterns:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise UserError(message("parallel_names_no_module", module=pattern, hint=nearest_name(pattern, names)))
        begins += matching
    called = [name for name in trial.called if name in begins]
    for name in begins:
        if (calls := trial.calls_of(name)) != 1:
            raise Refused(message("stage_begins_at_a_module_called_often", module=name, calls=calls))
    if len(called) != stages - 1:
        raise UserError(message("parallel_begins_other_stages", begins=called, stages=stages, needed=stages - 1))
    return called


class StageTrial(Trial):
    """A model and a few rows, on which plans are tried. called: the names of its modules, in the order of the forward
    pass."""

    def __init__(self, job: Job, device: str, batch: Batch) -> None:
        super().__init__(job, device, batch, seed=SEED)
        self._changes_rows, self._whole = False, self._copy()
        self._names = {id(tensor): name for name, tensor in tensors_of(self._whole)}
        self._operations_before: dict[str, int] = {}  # a module -> the operations before its first call
        generator = self.generator.manual_seed(SEED)
        self._counter = FlopCounterMode(display=False)
        self._modules = dict(self._whole.named_modules())
        record = RecordedForward(self._modules, device, began=self._count)
        with record, self._counter:
            self.loss: Tensor = raising("forward", lambda: self._loss(self._whole), batch.micro_batch.rows)
        self.called = [call.name for call in record.calls]
        # ("call", a module) and ("use", a parameter or buffer), in order; the calls have the values of the forward pass
        self._events = [("call", e.name) if isinstance(e, Call) else ("use", e.tensor) for e in record.events]
        self._draws = not torch.equal(generator.get_state(), generator.manual_seed(SEED).get_state())
        self.loss.backward()
        self._calls = [Counter(self.called), *(self._called_with(seed) for seed in OTHER_SEEDS if self._draws)]

    def _count(self, call: Call) -> None:
        self._operations_before.setdefault(call.name, self._counter.get_total_flops())

    def _copy(self, held: Collection[str] | None = None) -> nn.Module:
        """Returns another model like the trial's. One that cannot be copied, as with torch's old weight_norm, is built
        anew. held: names of the parameters and buffers that it has; in the places of others are absent tensors."""
        # Before the copy, since a stage needs none of what the others hold.
        absent = _absent_but(self.model, held)
        try:
            return copied_module(self.model, {id(tensors[name]): tensor for tensors, name, tensor in absent})
        except Exception:
            with torch.random.fork_rng():
                model = self._job.model().to(self.device).train()
            for tensors, name, tensor in _absent_but(model, held):
                tensors[name] = tensor
            return model

    def _called_with(self, seed: int) -> Counter[str]:
        """Returns how often each module is called with other random numbers: layerdrop leaves some out."""
        self.generator.manual_seed(seed)
        with RecordedForward(self._modules, self.device) as record, torch.no_grad():
            self._loss(self._whole)
        return Counter(call.name for call in record.calls)

    @property
    def varying(self) -> set[str]:
        """The names of the modules that a forward pass calls or does not, by random numbers."""
        return {
            name
            for calls in self._calls
            for name in calls
            if any(calls[name] != other_calls[name] for other_calls in self._calls)
        }

    def operations(self, blocks: Sequence[str]) -> list[int]:
        """Returns how many floating-point operations the forward pass takes from the beginning of each block to that of
        the next one; the first block has those before it, too."""
        before = [0, *(self._operations_before[name] for name in blocks[1:]), self._counter.get_total_flops()]
        return [after - first for first, after in pairwise(before)]

    def calls_of(self, name: str) -> int:
        """Returns how often a forward pass calls a module; where that is random, another number than 1."""
        return next((calls[name] for calls in self._calls if calls[name] != 1), 1)

    def _loss(self, model: nn.Module) -> Tensor:
        batch = fresh(self._batch)
        before = [(leaf, leaf._version) for leaf in tree_leaves(batch.data) if isinstance(leaf, Tensor)]
        loss: Tensor = self._job.criterion(self._job.forward(model, batch), batch)
        self._changes_rows = self._changes_rows or any(leaf._version > version for leaf, version in before)
        return loss

    def blocks(self, stages: int) -> list[str]:
        """Returns the names of the model's blocks: of what stands in its lists and sequences, is called once and has
        parameters. What is a list itself counts by its own blocks where there would be fewer than stages."""
        blocks: dict[str, None] = {}
        for name, _ in self.model.named_modules():
            if not any(name == block or name.startswith(f"{block}.") for block in blocks):
                blocks |= dict.fromkeys(self._children(name))
        while len(blocks) < stages and (inner := next((n for n in blocks if self._children(n)), None)) is not None:
            blocks = {name: None for block in blocks for name in (self._children(inner) if block == inner else [block])}
        return [name for name in self.called if name in blocks]

    def _children(self, name: str) -> list[str]:
        """Returns the blocks of a list or a sequence; none of any other module, and none where there is only one."""
        module = self.model.get_submodule(name)
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            return []
        children = {f"{name}.{child}" if name else child: inner for child, inner in module.named_children()}
        once = [n for n, inner in children.items() if self.calls_of(n) == 1 and [*inner.parameters()]]
        return once if len(once) > 1 else []

    def plan(self, begins: Sequence[str]) -> StagePlan:
        """Returns the plan of stages that begin so. Raises Refused where they do not add up to the model."""
        if begins and _has_node(self.loss, "CheckpointFunctionBackward"):
            raise Refused(message("reentrant_checkpoint_is_not_cut"))
        holders = self._holders(begins)
        cuts = self._cuts(begins, holders)
        return StagePlan(cuts, holders, self._draws, self._changes_rows)

    def _holders(self, begins: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """Returns which stages use each parameter and buffer: in an operation, or else by calling its module; of one
        that these rows have not called, the innermost module around it that they have."""
        uses, calls, stage = dict[str, set[int]](), dict[str, set[int]](), 0
        for kind, name in self._events:
            stage += kind == "call" and name in begins
            (uses if kind == "use" else calls).setdefault(name, set()).add(stage)
        stages: dict[str, set[int]] = {}
        for around, module in self._whole.named_modules():
            while around and around not in calls:
                around = around.rpartition(".")[0]
            for _, tensor in tensors_of(module, recurse=False):
                stages.setdefault(self._names[id(tensor)], set()).update(calls.get(around, {0}))
        return {name: tuple(sorted(uses.get(name) or stages[name])) for name in self._names.values()}

    def _cuts(self, begins: Sequence[str], holders: Mapping[str, tuple[int, ...]]) -> tuple[Cut, ...]:
        generator = self.generator
        cuts, models, joints = list[Cut](), _StageModels(self._copy), list[tuple[Any, dict[int, Tensor]]]()
        sent: Sequence[Any] = ()
        loss: Tensor | None = None
        outputs = Outputs()
        for stage, (first, last) in enumerate(zip((None, *begins), (*begins, None))):
            model, absent = models.next({name for name, stages in holders.items() if stage in stages})
            received: dict[int, Tensor] = {}
            receive = partial(_receive, sent, received, generator, generator.get_state())
            generator.manual_seed(SEED)
            before, sent = sent, ()
            try:
                forward = StageForward(model, stage, first, last, device=self.device, outputs=outputs)
                with without(absent):
                    loss = forward.run(partial(self._loss, model), receive)
            except StageOutput as output:
                sent = output.leaves
            except UserError:
                raise
            except Exception as error:
                raise Refused(_why(stage, first, error)) from error
            if first:
                needs_grad = tuple(tensor.requires_grad for tensor in received.values())
                orders = tuple(tuple(memory_order(tensor)) for tensor in received.values())
                cuts.append(Cut(first, tuple(received), needs_grad, orders))
                joints.append((before, received))
        if loss is None or loss.is_meta:
            raise Refused(message("stages_do_not_add_up", begins=[*begins], parameter=None, what="loss"))
        try:
            self._check(begins, loss, models.all, joints)
            # Where shapes depend on values, a rank that receives them does not know them.
            leaves = {cut.module: cut.leaves for cut in cuts}
            sizes_at(partial(self._loss, self.model), self.model, leaves, self.device, outputs)
        except UserError:
            raise
        except Exception as error:
            raise Refused(_why(1, begins[0] if begins else None, error)) from error
        return tuple(cuts)

    def _check(
        self, begins: Sequence[str], loss: Tensor, models: Sequence[nn.Module], joints: Sequence[tuple[Any, Any]]
    ) -> None:
        """Raises Refused where the stages' loss or gradients are not those of the whole model."""
        if not _close(self.loss, loss):
            raise Refused(message("stages_do_not_add_up", begins=[*begins], parameter=None, what="loss"))
        loss.backward()
        for sent, received in reversed(joints):
            with_grad = [n for n, tensor in received.items() if tensor.grad is not None and sent[n].requires_grad]
            if with_grad:
                torch.autograd.backward([sent[n] for n in with_grad], [received[n].grad for n in with_grad])
        parameters = dict(self._whole.named_parameters())
        rounding = rounding_of((parameter.grad for parameter in parameters.values()), DIVIDED_GRADIENT)
        of_stages = [dict(model.named_parameters()) for model in models]
        for name, parameter in parameters.items():
            gradients = [gradient for stage in of_stages if (gradient := stage[name].grad) is not None]
            total = torch.stack(gradients).sum(0) if gradients else None
            if not _close(parameter.grad, total, rounding=rounding):
                raise Refused(message("stages_do_not_add_up", begins=[*begins], parameter=name, what=None))


class _StageModels:
    """The models in which the stages of a trial run. They are one, until a pass leaves something in it, which is not
    there on another rank: then each of the stages after it has its own. copy: as of StageTrial._copy()."""

    def __init__(self, copy: Callable[..., nn.Module]) -> None:
        self._copy, self._shared = copy, copy()
        self._unchanged, self._is_shared = Unchanged(self._shared), True
        names = {id(tensor): name for name, tensor in tensors_of(self._shared)}
        self._absent = [
            (names[id(place[0][place[1]])], place) for place in absent_tensors(self._shared, lambda _: False)
        ]
        self.all = [self._shared]

    def next(self, held: Collection[str]) -> tuple[nn.Module, list[Absent]]:
        """Returns the model of the next stage, and what is absent in it while the stage runs. held: names of the
        parameters and buffers that the stage has."""
        self._is_shared = self._is_shared and self._unchanged.is_so()
        if self._is_shared:
            return self._shared, [place for name, place in self._absent if name not in held]
        self.all.append(self._copy(held))
        return self.all[-1], []


def _absent_but(model: nn.Module, held: Collection[str] | None) -> list[Absent]:
    """Returns absent tensors for a model's parameters and buffers that are not held; none where all are."""
    names = {id(tensor): name for name, tensor in tensors_of(model)}
    return [] if held is None else absent_tensors(model, lambda tensor: names[id(tensor)] in held)


def _receive(
    sent: Sequence[Any],
    received: dict[int, Tensor],
    generator: torch.Generator,
    state: Tensor,
    absent: Mapping[int, Tensor],
) -> dict[int, Tensor]:
    """Returns what the stage before has sent, and notes the leaves of the graph in `received`."""
    generator.set_state(state)
    for number, tensor in absent.items():
        if not isinstance(sent[number], Tensor) or sent[number].shape != tensor.shape:
            raise RuntimeError("the stage before has a tensor of another shape")
        received[number] = sent[number].detach().requires_grad_(sent[number].requires_grad)
    # Not the leaves themselves: a module may change its input in place, as autograd allows of no leaf and of no view.
    return {number: tensor.clone() for number, tensor in received.items()}


def _why(stage: int, module: str | None, error: Exception) -> Message:
    return message("stage_does_not_run_alone", stage=stage, module=module, error=error_line(error))


def _has_node(tensor: Tensor, name: str) -> bool:
    """Returns whether the graph of a tensor has a node of this name."""
    waiting, known = [tensor.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in known:
            continue
        if node.name() == name:
            return True
        known.add(node)
        waiting += [inner for inner, _ in node.next_functions]
    return False
