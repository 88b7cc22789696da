"""Sequence parallelism of tensor parallel ranks: what is between split layers works on a chunk of the positions.

In a block of the model each rank has a chunk of the positions; the layers that are split by columns gather all of them,
and those by rows add up the ranks' parts and keep the chunk. So norms, dropout and elementwise operations between them
are computed, and their activations kept, once instead of on every rank. Which modules are such blocks is tried, as for
context parallel ranks (parallel/sequence_blocks.py); that the split layers fit in between is tried here, in one
process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from samestep.bounds import DIVIDED_APART
from samestep.errors import Refused, UserError
from samestep.job import Job
from samestep.job.walk import leaves_of
from samestep.message import message
from samestep.parallel.plan_trial import Apart, is_close, tried
from samestep.parallel.sequence_blocks import (
    Block,
    Chunks,
    Played,
    SequencePlan,
    SequenceRank,
    attention,
    on_chunks,
    sequence_plan,
)
from samestep.parallel.tensor_plan import OUTPUTS, ROWS, ROWWISE, Plan, TensorTrial, narrowed
from samestep.rank.shards import block_of, is_shard
from samestep.rank.threaded_group import alike_on_ranks

_close = partial(is_close, tolerance=DIVIDED_APART)


@alike_on_ranks
def sequence_parallel_plan(job: Job, plan: Plan, ranks: int, device: str = "cpu") -> SequencePlan:
    """Returns the blocks in which `ranks` ranks have a chunk of the positions each. plan: which layers they split.
    Raises Refused where the model has none, or its length does not divide."""
    try:
        blocks = sequence_plan(job, ranks, "gather", device)
        with torch.random.fork_rng():
            trial = tried(job, ROWS, device, partial(TensorTrial, job, device))
        if wrong := _wrong_block(trial, plan, blocks):
            raise Refused(message("split_layers_do_not_fit_in_block", block=wrong))
        if tied := _tied_outside(trial.model, blocks.blocks):
            raise Refused(message("block_shares_a_parameter", parameter=tied))
    except UserError as error:
        raise Refused(message("sequence_parallel_does_not_fit", why=error.message)) from error
    return blocks


def dim_of_layers(plan: Plan, blocks: Sequence[Block]) -> dict[str, int]:
    """Returns the name of each layer of a plan that is in a block -> the dimension of the positions there."""
    dims = {}
    for name in plan:
        block = next((block for block in blocks if _is_inside(name, block)), None)
        if block is not None:
            dims[name] = next(dim for dim in block.inputs if dim is not None)
    return dims


def _is_inside(name: str, block: Block) -> bool:
    return not block.name or name == block.name or name.startswith(f"{block.name}.")


def _tied_outside(model: nn.Module, blocks: Sequence[Block]) -> str | None:
    """Returns the name of a parameter that is in a block and outside of all of them: its gradient would have a part of
    one rank's positions, and one of all."""
    inside = {id(p) for block in blocks for p in model.get_submodule(block.name).parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in inside and not any(_is_inside(name, block) for block in blocks):
            return name
    return None


class _Gathered(SequenceRank):
    """A rank whose attention is of all positions: it stands between split layers, which gather them."""

    length = 0  # of the sequence

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Raises Refused for attention that is given a rank's positions alone: it is outside of split layers."""
        if query.shape[-2] != self.length:
            raise Refused(message("attention_outside_of_split_layers"))
        return attention(query, key, value, **options)


class _PlayedBlocks(_Gathered, Played):
    """One rank in the trial, or with one chunk all of them."""

    def split(self, tensor: Tensor, dim: int) -> Tensor:
        self.length = tensor.shape[dim]
        return super().split(tensor, dim)


def _wrong_block(trial: TensorTrial, plan: Plan, sequence: SequencePlan) -> str | None:
    """Computes the forward pass of each rank in turn. Returns the name of a layer or block where the ranks' chunks are
    not those of the whole; None: all is right."""
    dims = dim_of_layers(plan, sequence.blocks)
    columns = [name for name in dims if plan[name] in OUTPUTS]
    rows = [name for name in dims if plan[name] == ROWWISE and name in trial.linear]
    everything, inputs = _PlayedBlocks(Chunks(1), tolerance=DIVIDED_APART), dict[str, list[Tensor]]()
    with ExitStack() as hooks:
        for name in columns:
            hooks.callback(_before(trial.layers[name], partial(_noted, inputs, name)))
        whole_outputs = hooks.enter_context(trial.outputs_of(rows))
        hooks.enter_context(on_chunks(trial.model, sequence.blocks, everything))
        expected = leaves_of(trial.forward())
    sums = dict[str, list[Tensor]]()
    for rank in range(sequence.chunks.ranks):
        counts = dict.fromkeys((*columns, *rows), 0)

        def gathered(name: str, given: Tensor, rank: int = rank, counts: dict[str, int] = counts) -> Tensor:
            counts[name] += 1
            of_all = inputs[name][counts[name] - 1]
            if not _close(sequence.chunks.take(of_all, dims[name], rank), given):
                raise Apart(name)
            return of_all

        def keep_chunk(name: str, output: Tensor, rank: int = rank, counts: dict[str, int] = counts) -> Tensor:
            counts[name] += 1
            of_all = whole_outputs[name][counts[name] - 1]
            if output.shape != of_all.shape:
                raise Apart(name)
            sums.setdefault(name, [torch.zeros_like(of_all) for of_all in whole_outputs[name]])
            sums[name][counts[name] - 1] += output
            return sequence.chunks.take(of_all, dims[name], rank)

        with ExitStack() as parts:
            for name in (*columns, *rows):
                parts.enter_context(narrowed(trial.linear[name], plan[name], rank, sequence.chunks.ranks))
            for name in columns:
                parts.callback(_before(trial.layers[name], partial(gathered, name)))
            for name in rows:
                hook = partial(lambda name, keep, layer, inputs, output: keep(name, output), name, keep_chunk)
                parts.callback(trial.layers[name].register_forward_hook(hook).remove)
            played = _PlayedBlocks(sequence.chunks, rank, everything.joined, tolerance=DIVIDED_APART)
            parts.enter_context(on_chunks(trial.model, sequence.blocks, played))
            try:
                output = leaves_of(trial.forward())
            except Apart as error:
                return error.where or sequence.blocks[0].name
            except Refused:
                raise
            except UserError:  # a shape that does not fit, wherever it shows
                return sequence.blocks[0].name
        if not all(map(_close, expected, output)):
            return sequence.blocks[-1].name
    return next((name for name in sums if not all(map(_close, whole_outputs[name], sums[name]))), None)


def _noted(inputs: dict[str, list[Tensor]], name: str, tensor: Tensor) -> Tensor:
    inputs.setdefault(name, []).append(tensor.clone())
    return tensor


def _before(layer: nn.Module, change: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """Lets a layer read change(its input). Returns what ends this."""
    return layer.register_forward_pre_hook(lambda layer, inputs: (change(inputs[0]), *inputs[1:])).remove


class SequenceShards(_Gathered):
    """This rank's chunk of the positions in the blocks of a model whose layers are split.

    mesh: of the ranks of a replica. The gradients of what blocks have whole are of the rank's positions alone:
    sum_gradients() adds them up.
    """

    def __init__(self, model: nn.Module, plan: SequencePlan, mesh: DeviceMesh) -> None:
        self.chunks, self.rank, self._mesh = plan.chunks, mesh.get_local_rank(), mesh
        self._model, self._blocks = model, plan.blocks
        names = [name for name, p in model.named_parameters() if not is_shard(p)]
        self._whole = [name for name in names if any(_is_inside(name, block) for block in plan.blocks)]

    @contextmanager
    def on_chunks(self) -> Iterator[None]:
        """Lets the blocks compute on this rank's chunk while the block runs."""
        with on_chunks(self._model, self._blocks, self):
            yield

    def sum_gradients(self) -> None:
        """Adds up the gradients of what is whole in the blocks over the ranks of the replica."""
        parameters: Mapping[str, nn.Parameter] = dict(self._model.named_parameters())
        for name in self._whole:
            if (gradient := parameters[name].grad) is not None:
                dist.all_reduce(block_of(gradient), group=self._mesh.get_group())

    def split(self, tensor: Tensor, dim: int) -> Tensor:
        self.length = tensor.shape[dim]
        return self._placed(tensor, Replicate()).redistribute(placements=[Shard(dim)]).to_local()

    def join(self, tensor: Tensor, dim: int) -> Tensor:
        return self._placed(tensor, Shard(dim)).redistribute(placements=[Replicate()]).to_local()

    def take_whole(self, leaf: Any) -> Any:
        """Returns what every rank has. Backward: each rank's gradient is of its positions; they are added up."""
        if not (isinstance(leaf, Tensor) and leaf.requires_grad):
            return leaf
        return self._placed(leaf, Replicate()).to_local(grad_placements=[Partial()])

    def give_whole(self, leaf: Any) -> Any:
        """Returns what every rank has. Backward: each takes its share of the gradient, which all have."""
        if not (isinstance(leaf, Tensor) and leaf.requires_grad):
            return leaf
        return leaf.detach() + (leaf - leaf.detach()) / self.chunks.ranks

    def _placed(self, tensor: Tensor, placement: Shard | Replicate) -> DTensor:
        return DTensor.from_local(tensor, self._mesh, [placement], run_check=False)
