"""Which modules compute on a chunk of the sequence: what is found in a model, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from mutations.jobs import sequences
from samestep import Job, Recipe
from samestep.errors import UserError
from samestep.parallel import sequence_blocks
from samestep.parallel.plan_trial import first_rows
from samestep.parallel.sequence_blocks import Chunks, SequenceRank, attention, on_chunks, sequence_plan

LENGTH, WIDTH = 8, 12


class Block(nn.Module):
    """Attention, and `also`: (x) -> what is added."""

    def __init__(self, also: Callable[[Tensor], Tensor] = torch.relu, *, drop: float = 0.0, **options: Any) -> None:
        super().__init__()
        self.attend, self.also, self.drop, self.options = nn.Linear(WIDTH, 3 * WIDTH), also, drop, options

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.attend(x).view(len(x), -1, 3, 3, 4).permute(2, 0, 3, 1, 4)
        drop = self.drop if self.training else 0.0
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=drop, **self.options)
        return x + self.also(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Positions, blocks, and a mean over the positions: `hidden` before the blocks, `pooled` after them."""

    def __init__(self, *blocks: nn.Module, mask: Tensor | None = None, before: nn.Module | None = None) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks, self.mask, self.before = nn.ModuleList(blocks), mask, before or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x) + self.place
        for block in self.blocks:
            x = block(x) if self.mask is None else block(x, self.mask)
        return x.mean(1)


class InPlace(Block):
    """Changes its input in place, and what another module has returned."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x.mul_(2), mask).add_(1)


class ChangedAfter(Model):
    """Changes in place what the last block has returned."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.place
        for block in self.blocks:
            x = block(x)
        return x.mul_(2).mean(1)


class Counted(nn.Module):
    """Adds what depends on where a position is, and counts from 0 in each call."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.arange(x.shape[1])[:, None]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]  # type: ignore[no-any-return]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


class Remembered(Block):
    """Keeps a figure of its chunk, which the loss reads."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.figure = x.square().mean()
        return super().forward(x, mask)


def encoder(dropout: float = 0.0) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 3, 20, dropout=dropout, batch_first=True)


class Padded(nn.Module):
    """Layers for which padded positions are no keys. left_out: no mask is given where no row of a batch is padded, as
    transformers does."""

    def __init__(self, *, left_out: bool = False) -> None:
        super().__init__()
        self.layers, self.left_out = nn.ModuleList(encoder() for _ in range(2)), left_out

    def forward(self, x: Tensor) -> Tensor:
        padding = x[:, :, 0] == 0
        given = padding if padding.any() or not self.left_out else None
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=given)
        return x.mean(1)


class Caching(nn.Module):
    """A block keeps its keys in an object that it is called with, as a Llama with use_cache=True."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = KeepsKeys()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, SimpleNamespace(keys=None)).mean(1)  # type: ignore[no-any-return]


class KeepsKeys(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: SimpleNamespace) -> Tensor:
        key = self.attend(x)
        cache.keys = key if cache.keys is None else torch.cat([cache.keys, key], 1)
        return F.scaled_dot_product_attention(x, cache.keys, cache.keys)


def job(model: Callable[[], nn.Module], inputs: Tensor | None = None) -> Job:
    if inputs is None:
        inputs = torch.randn(9, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    return Job(
        model=model,
        criterion=lambda output, batch: output.square().mean(),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.1}),
        train=TensorDataset(inputs, inputs),
        global_batch=4,
    )


CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
PADDED = (torch.arange(LENGTH) < 5)[None, None, None]


@pytest.mark.parametrize(
    ("model", "ranks", "how"),
    [
        (lambda: Model(Block(), Block(is_causal=True)), 2, "gather"),
        (lambda: Model(Block(is_causal=True)), 4, "ring"),
        (lambda: Model(Block()), 2, "ring"),
        (lambda: Model(Block(), mask=CAUSAL), 4, "gather"),
        (lambda: Model(Block(), mask=PADDED), 2, "gather"),
        (lambda: Model(Block(nn.LayerNorm(WIDTH))), 2, "gather"),
        (lambda: Model(Block(), before=Convolution()), 2, "gather"),
        (lambda: Model(encoder()), 2, "gather"),
        (lambda: Model(Block(nn.Dropout(0.5))), 2, "gather"),
        (lambda: Model(InPlace(), InPlace()), 2, "gather"),
        (lambda: ChangedAfter(Block()), 2, "gather"),
    ],
    ids=["two", "causal", "ring", "mask", "padding", "norm", "before", "encoder", "dropout", "in place", "after"],
)
def test_blocks_are_found(model: Callable[[], Model], ranks: int, how: str) -> None:
    plan = sequence_plan(job(model), ranks, how)
    assert [block.name for block in plan.blocks] == [f"blocks.{n}" for n in range(len(model().blocks))]
    assert {block.inputs[0] for block in plan.blocks} == {1}


def padded_rows(*ends: int) -> Tensor:
    """Rows that are 0 from their end on."""
    inputs = torch.randn(len(ends), LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    return inputs * (torch.arange(LENGTH) < torch.tensor(ends)[:, None])[..., None]


def test_plans_are_tried_on_rows_that_differ_in_their_padding() -> None:
    for ends, chosen in (((8, 8, 8, 8, 8, 3, 8), [0, 5, 1]), ((8,) * 7, [0, 1, 2])):
        in_order = replace(job(encoder, padded_rows(*ends)), shuffle=False)
        assert first_rows(in_order, 3, "cpu").micro_batch.indices.tolist() == chosen


@pytest.mark.parametrize("left_out", [False, True])
def test_a_padding_mask_is_divided_with_its_keys(left_out: bool) -> None:
    """One row in seven is padded, and none of the first three."""
    plan = sequence_plan(job(lambda: Padded(left_out=left_out), padded_rows(8, 8, 8, 8, 8, 3, 8)), 2, "gather")
    assert [block.name for block in plan.blocks] == ["layers.0", "layers.1"]
    assert [block.inputs[-1] for block in plan.blocks] == [1, 1]


def test_a_block_that_is_the_whole_model_has_a_name() -> None:
    plan = sequence_plan(job(encoder), 2, "gather")
    assert [block.name for block in plan.blocks] == [""]
    assert plan.said(encoder(), "gather").fields["blocks"] == ["TransformerEncoderLayer"]


@pytest.mark.parametrize(
    ("model", "how", "said"),
    [
        (lambda: Model(Block(Convolution())), "gather", "positions_meet_outside_of_attention"),
        (lambda: Model(Block(Recurrent())), "gather", "positions_meet_outside_of_attention"),
        (lambda: Model(Block(lambda x: x.mean(1, keepdim=True))), "gather", "positions_meet_outside_of_attention"),
        (lambda: Model(Block(lambda x: x.cumsum(1))), "gather", "positions_meet_outside_of_attention"),
        (lambda: Model(Block(lambda x: x.flip(1))), "gather", "positions_meet_outside_of_attention"),
        (lambda: Model(Block(Counted())), "gather", "positions_meet_outside_of_attention"),
        (lambda: Model(Block(nn.BatchNorm1d(LENGTH))), "gather", "block_does_not_take_a_chunk"),
        (lambda: Model(encoder(dropout=0.5)), "gather", "random_numbers_inside_of_divided_blocks"),
        (Caching, "gather", "block_is_given_an_object"),
        (lambda: Model(encoder(), mask=CAUSAL), "gather", "block_does_not_take_a_chunk"),
        (lambda: Model(Block(drop=0.5)), "gather", "random_numbers_inside_of_divided_blocks"),
        (lambda: Model(Recurrent()), "gather", "model_without_attention"),
        (lambda: Model(Block(), mask=CAUSAL), "ring", "ring_takes_no_mask"),
        (lambda: Model(Block()), "ulysses", "heads_do_not_divide"),  # 3 heads
    ],
)
def test_positions_that_meet_elsewhere_are_refused(model: Callable[[], nn.Module], how: str, said: str) -> None:
    with pytest.raises(UserError) as raised:
        sequence_plan(job(model), 2, how)
    assert raised.value.message.id == said


def test_a_loss_that_reads_inside_of_a_block_is_refused() -> None:
    kept: list[Remembered] = []

    def model() -> nn.Module:
        kept[:] = [Remembered()]
        return Model(*kept)

    def criterion(output: Tensor, batch: Any) -> Tensor:
        return output.square().mean() + kept[0].figure

    asked = job(model)
    with pytest.raises(UserError) as raised:
        sequence_plan(Job(**{**vars(asked), "criterion": criterion}), 2, "gather")
    assert raised.value.message.id == "positions_meet_outside_of_attention"


def test_a_length_that_the_ranks_do_not_divide_is_refused() -> None:
    with pytest.raises(UserError) as raised:
        sequence_plan(job(lambda: Model(Block())), 3, "gather")
    assert raised.value.message.id == "sequence_does_not_divide"
    assert raised.value.message.fields["length"] == LENGTH


def test_a_plan_leaves_torch_and_its_random_numbers_as_they_are() -> None:
    before = torch.random.get_rng_state(), F.scaled_dot_product_attention, F.dropout
    sequence_plan(sequences(), 2, "gather")
    after = torch.random.get_rng_state(), F.scaled_dot_product_attention, F.dropout
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


class OneRank(SequenceRank):
    """A rank that has all positions."""

    chunks, rank = Chunks(1), 0

    def split(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor

    def join(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return attention(query, key, value, **options)


class Transposed(nn.Module):
    """What it computes lies transposed in memory, as the output of nn.MultiheadAttention does."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop((x * 2).transpose(0, 1).contiguous().transpose(0, 1))  # type: ignore[no-any-return]


class Copying(OneRank):
    """Tensors that were exchanged lie in memory in the order of their dimensions."""

    def split(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)

    join = split


def test_what_dropout_draws_of_a_divided_block_is_that_of_one_process() -> None:
    """It draws value after value as they lie in memory."""
    model, x = nn.Sequential(Transposed(), nn.Dropout(0.5)), torch.randn(LENGTH, 3, WIDTH).transpose(0, 1)
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    with on_chunks(model, [sequence_blocks.Block("0", (1,), (1,))], Copying()):
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize(("late", "refused"), [(None, False), (torch.ones(LENGTH, 2), True)])
def test_a_mask_that_the_trial_did_not_have_is_taken_or_named(late: Tensor | None, refused: bool) -> None:
    class TwoRanks(Copying):
        chunks = Chunks(2)

        def split(self, tensor: Tensor, dim: int) -> Tensor:
            return tensor.chunk(2, dim)[0]

        def join(self, tensor: Tensor, dim: int) -> Tensor:
            return torch.cat([tensor, tensor], dim)

    block = sequence_blocks.Block("layer", (1, None), (1,), (True, False))
    model = nn.ModuleDict({"layer": Adding()})
    with on_chunks(model, [block], TwoRanks()):
        if not refused:
            assert model["layer"](torch.ones(3, LENGTH, 2), late).shape == (3, LENGTH, 2)
            return
        with pytest.raises(UserError) as raised:
            model["layer"](torch.ones(3, LENGTH, 2), late)
        assert raised.value.message.id == "block_is_called_otherwise"


class Adding(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x if mask is None else x + mask


class Checkpointed(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("divided", "refused"), [("blocks.0.inside", False), ("blocks.0", True)])
def test_a_checkpoint_is_around_a_block_and_not_inside_of_it(divided: str, refused: bool) -> None:
    model, x = Model(Checkpointed(Block())), torch.randn(3, LENGTH, WIDTH)
    with on_chunks(model, [sequence_blocks.Block(divided, (1,), (1,))], OneRank()):
        output = model(x).sum()
        if refused:
            with pytest.raises(UserError) as raised:
                output.backward()
            assert raised.value.message.id == "checkpoint_inside_of_divided_block"
        else:
            output.backward()


@pytest.mark.parametrize(
    ("length", "dropout_p", "said"),
    [(LENGTH, 0.5, "random_numbers_inside_of_divided_blocks"), (7, 0.0, "sequence_does_not_divide")],
)
def test_what_a_trial_did_not_show_ends_the_training(length: int, dropout_p: float, said: str) -> None:
    class TwoRanks(OneRank):
        chunks = Chunks(2)

    model = Block(drop=dropout_p)
    with on_chunks(model, [sequence_blocks.Block("", (1, None), (1,))], TwoRanks()), pytest.raises(UserError) as raised:
        model(torch.randn(3, length, WIDTH), None)
    assert raised.value.message.id == said


@pytest.mark.parametrize("balanced", [False, True])
def test_every_position_is_one_ranks(balanced: bool) -> None:
    chunks, tensor = Chunks(4, balanced), torch.arange(32).view(2, 16)
    pieces = [chunks.take(tensor, 1, rank) for rank in range(4)]
    assert torch.equal(chunks.put_together(pieces, 1), tensor)
    assert {piece.shape for piece in pieces} == {(2, 4)}
    causal = [int(piece[0].sum()) for piece in pieces]  # what causal attention costs each
    assert (len(set(causal)) == 1) is balanced
