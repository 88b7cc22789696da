"""Which modules of a model compute on a chunk of the sequence, as context parallel ranks let them.

In such a module positions meet in F.scaled_dot_product_attention alone. Which modules these are is not read from
their code: it is tried, in one process, before any rank starts. With random weights each rank's chunk goes through a
module in turn, its attention is given the keys of all positions, and its output must be that chunk of the module's.
What comes before and after these modules (position embeddings, pooling, the loss) computes on all positions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice, product
from threading import Lock
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from samestep.bounds import DIVIDED_ROWS_APART
from samestep.errors import Refused, UserError
from samestep.job import Batch, Job
from samestep.job.walk import flattened, leaves_of
from samestep.message import Message, message
from samestep.parallel.plan_trial import (
    Apart,
    Trial,
    draw_weights,
    is_close,
    laid_out,
    memory_order,
    tried,
    with_random_weights,
    without_fast_path,
)
from samestep.parallel.recorded_forward import Call, RecordedForward, copies_of
from samestep.rank.threaded_group import alike_on_ranks
from samestep.world.foreign_code import error_line

ROWS = 3  # of the batch on which modules are tried
SEED = 12  # of the weights with which modules are tried: a layer of zeros would hide what it does
TRIES = 64  # of dimensions along which a module's arguments may be divided
_close = partial(is_close, tolerance=DIVIDED_ROWS_APART)

attention, dropout = F.scaled_dot_product_attention, F.dropout  # torch's, which stand aside in a block


@dataclass(frozen=True)
class Chunks:
    """Which positions each of `ranks` ranks has: a chunk; balanced: an early and a late one, so that causal attention
    costs every rank the same."""

    ranks: int
    balanced: bool = False

    @property
    def unit(self) -> int:
        """What divides the length of a sequence that can be divided."""
        return self.ranks * (2 if self.balanced else 1)

    def positions(self, rank: int, length: int, device: Any = None) -> Tensor:
        """Returns a rank's positions, shape [length / ranks]."""
        chunks = torch.arange(length, device=device).chunk(self.unit)
        return torch.cat([chunks[rank], chunks[-1 - rank]]) if self.balanced else chunks[rank]

    def take(self, tensor: Tensor, dim: int, rank: int) -> Tensor:
        """Returns a rank's positions of a tensor that has all of them along `dim`."""
        return tensor.index_select(dim, self.positions(rank, tensor.shape[dim], tensor.device))

    def put_together(self, chunks: Sequence[Tensor], dim: int) -> Tensor:
        """Returns the tensor of all positions of the ranks' chunks, which are in the order of the ranks."""
        joined = torch.cat([*chunks], dim)
        if not self.balanced:
            return joined
        length = joined.shape[dim]
        order = torch.cat([self.positions(rank, length, joined.device) for rank in range(self.ranks)])
        return joined.index_select(dim, order.argsort())


@dataclass(frozen=True)
class Block:
    """A module that computes on a chunk. inputs: of each leaf of its arguments, and outputs: of each leaf of what it
    returns, the dimension of the positions; None: the leaf is not divided. tensors: which leaves of its arguments were
    tensors when it was tried."""

    name: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    tensors: tuple[bool, ...] = ()


class SequenceRank(Protocol):
    """One rank's chunk of a sequence.

    split: takes the rank's positions of a tensor of all. join: returns the tensor of all positions. take_whole,
    give_whole: of what is not divided, as a block is given or returns it. attend: as F.scaled_dot_product_attention,
    for the queries of the rank's positions and the keys of all; a mask has the keys of all, or of the rank's positions.
    """

    chunks: Chunks
    rank: int

    def split(self, tensor: Tensor, dim: int) -> Tensor: ...

    def join(self, tensor: Tensor, dim: int) -> Tensor: ...

    def take_whole(self, leaf: Any) -> Any:
        return leaf

    def give_whole(self, leaf: Any) -> Any:
        return leaf

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor: ...


class Attends(Protocol):
    """What takes the place of torch's functions."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor: ...

    def drop(self, tensor: Tensor, p: float, training: bool, inplace: bool) -> Tensor: ...


_current: ContextVar[Attends | None] = ContextVar("current", default=None)  # of this thread
_replaced, _lock = [0], Lock()  # how many threads have replaced torch's functions


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    options: dict[str, Any] = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
    options |= {"scale": scale, "enable_gqa": enable_gqa}
    attends = _asked()
    return attends.attend(query, key, value, **options) if attends else attention(query, key, value, **options)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    attends = _asked()
    return attends.drop(input, p, training, inplace) if attends else dropout(input, p, training, inplace)


def _asked() -> Attends | None:
    """Returns what takes the place of torch's functions. Raises Refused in a backward pass outside of a block: there an
    activation checkpoint repeats a piece of one, and would compute it for the chunk alone."""
    attends = _current.get()
    if attends is None and torch._C._current_graph_task_id() != -1:
        raise Refused(message("checkpoint_inside_of_divided_block"))
    return attends


@contextmanager
def _replaced_functions() -> Iterator[None]:
    """Lets F.scaled_dot_product_attention and F.dropout ask what is current in the thread that calls them."""
    functional: Any = F
    with _lock:
        _replaced[0] += 1
        functional.scaled_dot_product_attention, functional.dropout = _attention, _dropout
    try:
        yield
    finally:
        with _lock:
            _replaced[0] -= 1
            if not _replaced[0]:
                functional.scaled_dot_product_attention, functional.dropout = attention, dropout


@contextmanager
def _calling(attends: Attends) -> Iterator[None]:
    token = _current.set(attends)
    try:
        yield
    finally:
        _current.reset(token)


class _InBlock(NamedTuple):
    """Torch's functions inside of a block, whose first divided input has `dims` dimensions."""

    ranked: SequenceRank
    dim: int
    dims: int
    length: int  # of the rank's chunk

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if options["dropout_p"]:
            raise Refused(message("random_numbers_inside_of_divided_blocks", block=None))
        if query.shape[-2] != key.shape[-2]:
            raise Refused(message("positions_meet_outside_of_attention", block=None))
        return self.ranked.attend(query, key, value, **options)

    def drop(self, tensor: Tensor, p: float, training: bool, inplace: bool) -> Tensor:
        """Draws the mask of all positions, as one process does, and takes the rank's."""
        if not training or not p:
            return tensor
        if tensor.dim() != self.dims or tensor.shape[self.dim] != self.length:
            raise Refused(message("dropout_inside_of_divided_block", shape=str([*tensor.shape])))
        shape = [*tensor.shape]
        shape[self.dim] *= self.ranked.chunks.ranks
        mask = dropout(laid_out(tensor.new_ones(shape), memory_order(tensor)), p)
        chunk = self.ranked.chunks.take(mask, self.dim, self.ranked.rank)
        return tensor.mul_(chunk) if inplace else tensor * chunk


@contextmanager
def on_chunks(model: nn.Module, blocks: Sequence[Block], ranked: SequenceRank) -> Iterator[None]:
    """Lets the blocks of a model compute on one rank's chunk of the sequence while the block runs."""
    with ExitStack() as changed:
        changed.enter_context(_replaced_functions())
        for block in blocks:
            module: Any = model.get_submodule(block.name)
            changed.callback(_set_forward, module, vars(module).get("forward"))
            module.forward = partial(_forward_on_chunk, module.forward, block, ranked)
        yield


def _set_forward(module: Any, forward: Any) -> None:
    if forward is None:
        del module.forward
    else:
        module.forward = forward


def _forward_on_chunk(
    forward: Callable[..., Any], block: Block, ranked: SequenceRank, *arguments: Any, **named: Any
) -> Any:
    leaves, rebuilt = flattened((arguments, named))
    if len(leaves) != len(block.inputs):
        raise Refused(message("block_is_called_otherwise", block=block.name))
    # A mask may be left out where the rows are not padded.
    dims = [None if leaf is None else dim for leaf, dim in zip(leaves, block.inputs)]
    divided = [(leaf, dim) for leaf, dim in zip(leaves, dims) if dim is not None]
    lengths = {leaf.shape[dim] if isinstance(leaf, Tensor) and leaf.dim() > dim else -1 for leaf, dim in divided}
    if len(lengths) != 1 or -1 in lengths:
        raise Refused(message("block_is_called_otherwise", block=block.name))
    check_length(max(lengths), ranked.chunks)
    chunks = [
        ranked.take_whole(leaf) if dim is None else laid_out(ranked.split(leaf, dim), memory_order(leaf))
        for leaf, dim in zip(leaves, dims)
    ]
    (first, dim), (length,) = divided[0], lengths
    arguments, named = rebuilt(chunks)
    try:
        with _calling(_InBlock(ranked, dim, first.dim(), length // ranked.chunks.ranks)):
            output = forward(*arguments, **named)
    except (RuntimeError, AssertionError, ValueError, IndexError) as error:
        if not block.tensors or block.tensors == tuple(isinstance(leaf, Tensor) for leaf in leaves):
            raise
        raise Refused(message("block_is_called_otherwise", block=block.name)) from error
    leaves, rebuilt = flattened(output)
    if len(leaves) != len(block.outputs):
        raise Refused(message("block_is_called_otherwise", block=block.name))
    return rebuilt(
        ranked.give_whole(leaf) if dim is None else laid_out(ranked.join(leaf, dim), memory_order(leaf))
        for leaf, dim in zip(leaves, block.outputs)
    )


def check_length(length: int, chunks: Chunks) -> None:
    """Raises Refused for a sequence that the ranks cannot divide: gloo would abort."""
    if length % chunks.unit:
        raise Refused(message("sequence_does_not_divide", length=length, ranks=chunks.ranks, unit=chunks.unit))


# The trial


class Attention(NamedTuple):
    """One call of F.scaled_dot_product_attention. options: its keyword arguments."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: Mapping[str, Any]


class SequenceTrial(Trial):
    """A model with random weights and a few rows, whose modules are tried. attentions: in the order of their calls.

    Raises Refused for a model without attention.
    """

    def __init__(self, job: Job, device: str, batch: Batch, *, training: bool = True) -> None:
        super().__init__(job, device, batch, seed=SEED, training=training)
        self.attentions: list[Attention] = []
        # Copies: a module may change its arguments in place, and what comes after it its output.
        self._record = RecordedForward(dict(self.model.named_modules()), device, copies=True)
        self._wrong: Call | None = None  # of a module that cannot be divided
        self._errors: Sequence[Exception] = ()  # that the module then raises
        self._loss = with_random_weights(self._recorded, self.model, partial(draw_weights, self.model, SEED))
        if not self.attentions:
            raise Refused(message("model_without_attention"))

    def _recorded(self) -> Tensor | None:
        self.attentions.clear()
        with _replaced_functions(), _calling(self), self._record:
            return self.forward()[1]

    def why(self) -> Message:
        """Returns why the modules cannot be divided."""
        call = self._wrong
        block = (call.name or type(call.module).__name__) if call else None
        leaves = [leaf for leaf in call.arguments if not isinstance(leaf, Tensor)] if call else []
        objects = [type(leaf).__name__ for leaf in leaves if hasattr(leaf, "__dict__") and not callable(leaf)]
        if objects:
            return message("block_is_given_an_object", block=block, type=objects[0])
        if self._errors and not isinstance(self._errors[0], UserError):
            return message("block_does_not_take_a_chunk", block=block, error=error_line(self._errors[0]))
        return message("positions_meet_outside_of_attention", block=block)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        self.attentions.append(Attention(query, key, value, options))
        self._record.note(self.attentions[-1])
        return attention(query, key, value, **options)

    def drop(self, tensor: Tensor, p: float, training: bool, inplace: bool) -> Tensor:
        return dropout(tensor, p, training, inplace)

    def blocks(self, chunks: Chunks) -> list[Block] | None:
        """Returns the outermost modules that compute on chunks; None where a module's attention is in none."""
        for query, *_ in self.attentions:
            check_length(query.shape[-2], chunks)
        with torch.random.fork_rng(), torch.no_grad(), _replaced_functions():
            chosen = self._divisible(self._record.outermost, chunks)
        if chosen is None:
            return None
        blocks = {block.name: block for _, block in chosen}
        calls = [call for call, _ in chosen]
        if sum(len(call.noted) for call in calls) < len(self.attentions) or any(
            blocks[block.name] != block for _, block in chosen
        ):
            return None
        outputs = [(leaf, dim) for call, block in chosen for leaf, dim in zip(call.output, block.outputs)]
        joined = [leaf for leaf, dim in outputs if dim is not None]
        for rank in range(chunks.ranks):
            with on_chunks(self.model, [*blocks.values()], _PlayedAttention(calls, chunks, rank, joined)):
                try:
                    loss = self.forward()[1]
                except Apart:
                    return None
            if not _close(self._loss, loss):
                return None
        return [*blocks.values()]

    def _divisible(self, calls: Sequence[Call], chunks: Chunks) -> list[tuple[Call, Block]] | None:
        divided = []
        for call in _attending(calls):
            block = self._as_block(call, chunks)
            chosen = [(call, block)] if block else self._divisible(call.inner, chunks)
            if not chosen:
                self._wrong = self._wrong or call
                return None
            divided += chosen
        return divided

    def _as_block(self, call: Call, chunks: Chunks) -> Block | None:
        """Tries along which dimensions the arguments of a module may be divided. Returns it as a block, or None."""
        length, errors = call.noted[0].query.shape[-2], list[Exception]()
        options: list[list[int | None]] = []
        for leaf in call.arguments:
            dims = [dim for dim, size in enumerate(leaf.shape) if size == length] if isinstance(leaf, Tensor) else []
            # A mask of queries and keys need not be divided: its rows are taken where attention is computed.
            choices: list[int | None] = [dims[0], None] if dims else [None]
            options.append(choices[::-1] if len(dims) > 1 else choices)
        for inputs in islice(product(*options), TRIES):
            try:
                outputs = [self._tried(call, inputs, chunks, rank) for rank in reversed(range(chunks.ranks))]
            except Exception as error:  # as of a shape that does not fit, wherever it shows
                errors.append(error)
                continue
            if any(dim is not None for dim in inputs) and outputs[0] and all(dims == outputs[0] for dims in outputs):
                tensors = tuple(isinstance(leaf, Tensor) for leaf in call.arguments)
                return Block(call.name, tuple(inputs), outputs[0], tensors)
        if self._wrong is None and not _attending(call.inner):
            self._errors = errors
        return None

    def _tried(
        self, call: Call, inputs: Sequence[int | None], chunks: Chunks, rank: int
    ) -> tuple[int | None, ...] | None:
        """Calls a module with one rank's chunk. Returns the dimension of the positions in each leaf of its output; None
        where the output is another one. Raises what the module does."""
        own_leaves = copies_of(call.arguments)
        divided = [
            leaf if dim is None else laid_out(chunks.take(leaf, dim, rank), memory_order(leaf))
            for leaf, dim in zip(own_leaves, inputs)
        ]
        first = next(((leaf, dim) for leaf, dim in zip(divided, inputs) if dim is not None), None)
        if first is None:
            return None
        played = _PlayedAttention([call], chunks, rank)
        arguments, named = call.rebuilt(divided)
        self.generator.set_state(call.random)
        try:
            with call.autocast(), _calling(_InBlock(played, first[1], first[0].dim(), first[0].shape[first[1]])):
                output = leaves_of(call.module(*arguments, **named))
        finally:
            self.restore()
        assert call.random_after is not None
        if not torch.equal(self.generator.get_state(), call.random_after) or played.attended != len(call.noted):
            return None
        dims, expected = list[int | None](), call.output
        if len(expected) != len(output):
            return None
        for tensor, chunk in zip(expected, output):
            differing: list[int] = []
            if isinstance(tensor, Tensor) and isinstance(chunk, Tensor) and tensor.dim() == chunk.dim():
                differing = [dim for dim, size in enumerate(tensor.shape) if size != chunk.shape[dim]]
            dims.append(differing[0] if differing else None)
            if not _close(chunks.take(tensor, differing[0], rank) if differing else tensor, chunk):
                return None
        return tuple(dims) if any(dim is not None for dim in dims) else None


def _attending(calls: Sequence[Call]) -> list[Call]:
    """Returns the calls in which attention is computed."""
    return [call for call in calls if call.noted]


class Played(SequenceRank):
    """One rank in a trial, to which blocks give all positions where it returns its own.

    joined: what the blocks return, in the order of their calls. expected: what they must return, of all positions;
    None: these are all positions. tolerance: as of is_close().
    """

    def __init__(
        self, chunks: Chunks, rank: int = 0, expected: Sequence[Tensor] | None = None, *, tolerance: float
    ) -> None:
        self.chunks, self.rank, self.joined = chunks, rank, list[Tensor]()
        self._expected, self._tolerance = expected, tolerance

    def is_part(self, full_tensor: Tensor, dim: int, part: Tensor) -> bool:
        """Returns whether a tensor is the rank's positions of the whole one."""
        return is_close(self.chunks.take(full_tensor, dim, self.rank), part, tolerance=self._tolerance)

    def split(self, tensor: Tensor, dim: int) -> Tensor:
        return self.chunks.take(tensor, dim, self.rank)

    def join(self, tensor: Tensor, dim: int) -> Tensor:
        """Returns the tensor of all positions, of which the given one is a chunk. Raises Apart where it is not."""
        number = len(self.joined)
        self.joined.append(tensor)
        # Clones: what comes next may change them in place.
        if self._expected is None:
            return tensor.clone()
        if number >= len(self._expected) or not self.is_part(self._expected[number], dim, tensor):
            raise Apart
        return self._expected[number].clone()


class _PlayedAttention(Played):
    """One rank, whose attention is given the keys of all positions that the trial has recorded in the calls of blocks.
    expected: what they returned, of all positions."""

    def __init__(self, calls: Sequence[Call], chunks: Chunks, rank: int, expected: Sequence[Tensor] = ()) -> None:
        super().__init__(chunks, rank, expected, tolerance=DIVIDED_ROWS_APART)
        self.attended, self._attentions = 0, [called for call in calls for called in call.noted]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if self.attended == len(self._attentions):
            raise Apart
        recorded = self._attentions[self.attended]
        self.attended += 1
        for tensor, chunk in zip(recorded[:3], (query, key, value)):
            if not self.is_part(tensor, -2, chunk):
                raise Apart
        length, mask, of_all = recorded.query.shape[-2], options["attn_mask"], recorded.options["attn_mask"]
        if mask is not None and mask.shape[-1] == query.shape[-2] != length:  # of this rank's keys, as padding is
            if of_all is None or not self.is_part(of_all, -1, mask):
                raise Apart
            mask = of_all
        if options["is_causal"]:
            places = torch.arange(length, device=query.device)
            mask = self.chunks.positions(self.rank, length, query.device)[:, None] >= places
        elif mask is not None and mask.shape[-2] == length:
            mask = self.chunks.take(mask, -2, self.rank)
        return attention(query, recorded.key, recorded.value, **{**options, "attn_mask": mask, "is_causal": False})


# The plan


@dataclass(frozen=True)
class SequencePlan:
    """How the ranks of a replica divide a sequence. length: of the longest one that was tried."""

    blocks: list[Block]
    chunks: Chunks
    length: int

    def names(self, model: nn.Module) -> list[str]:
        """Returns the names of the blocks, those of a list as one: 'blocks.*'."""
        named = [block.name or type(model).__name__ for block in self.blocks]
        return [*dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in named)]

    def said(self, model: nn.Module, how: str) -> Message:
        """Returns the plan for the user to read."""
        if not self.blocks:
            return message("context_replicas_of_one_rank")
        names = self.names(model)
        fields = {"ranks": self.chunks.ranks, "length": self.length, "how": how}
        return message(
            "context_ranks_divide_the_sequence", blocks=names, balanced=self.chunks.balanced or None, **fields
        )


@alike_on_ranks
def sequence_plan(job: Job, ranks: int, how: str, device: str = "cpu") -> SequencePlan:
    """Returns how `ranks` ranks divide the sequences of a job's model. how: 'gather', 'ulysses' or 'ring'. Raises
    Refused where they cannot."""
    if ranks == 1:
        return SequencePlan([], Chunks(1), 0)
    with torch.random.fork_rng():
        trial = tried(job, ROWS, device, partial(SequenceTrial, job, device))
    lengths = [called.query.shape[-2] for called in trial.attentions]
    causal = all(called.options["is_causal"] for called in trial.attentions)
    balanced = how == "ring" and causal and not any(length % (2 * ranks) for length in lengths)
    chunks = Chunks(ranks, balanced)
    _check(how, trial.attentions, ranks, device)
    blocks = trial.blocks(chunks)
    if blocks is None:
        with torch.random.fork_rng(), without_fast_path():
            without_random = tried(job, ROWS, device, partial(SequenceTrial, job, device, training=False))
            is_random = without_random.blocks(chunks) is not None
        if is_random:
            block = trial.why().fields["block"]
            raise Refused(message("random_numbers_inside_of_divided_blocks", block=block))
        raise Refused(trial.why())
    return SequencePlan(blocks, chunks, max(lengths))


def _check(how: str, attentions: Sequence[Attention], ranks: int, device: str) -> None:
    """Raises Refused for attention that this way of computing it does not take."""
    heads = {tensor.shape[-3] for called in attentions for tensor in called[:2] if tensor.dim() > 2}
    if how == "ulysses" and (unfit := [count for count in heads if count % ranks]):
        raise Refused(message("heads_do_not_divide", heads=unfit[0], ranks=ranks))
    if how != "ring":
        return
    if (
        device.partition(":")[0] != "cpu"
        or find_spec("torch.distributed.tensor.experimental._context_parallel") is None
    ):
        raise Refused(message("ring_is_not_there"))
    for query, key, _, options in attentions:
        if options["attn_mask"] is not None or query.dim() != 4 or query.shape[-3] != key.shape[-3]:
            raise Refused(message("ring_takes_no_mask"))
