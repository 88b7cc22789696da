"""In which blocks of a model tensor parallel ranks have a chunk of the positions, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mutations.jobs import Causal, CausalBlock, heads, sequences
from samestep import Job
from samestep.errors import UserError
from samestep.parallel.sequence_parallel import dim_of_layers, sequence_parallel_plan
from samestep.parallel.tensor_plan import division_of


class OfInput(CausalBlock):
    """Attention whose shape is that of the block's input."""

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        parts = self.attend(self.norm1(x)).chunk(3, -1)
        attended = F.scaled_dot_product_attention(*(p.view(rows, length, -1, 4).transpose(1, 2) for p in parts))
        x = x + self.project(attended.transpose(1, 2).reshape(rows, length, -1))
        return x + self.feed(self.norm2(x))  # type: ignore[no-any-return]


class Scaled(CausalBlock):
    """What its first layer is given, and what comes after it, depend on the length of the block's input."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.Linear(self.attend.in_features, self.attend.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.attend(self.norm1(x) * x.shape[1]) / x.shape[1]
        rows, length, _ = projected.shape
        heads = (part.view(rows, length, -1, 4).transpose(1, 2) for part in projected.chunk(3, -1))
        attended = F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(rows, length, -1)
        x = x + self.project(attended)
        return x + self.feed(self.norm2(x))  # type: ignore[no-any-return]


class Fixed(CausalBlock):
    """A number of heads that is fixed, so that attention stays whole."""

    def forward(self, x: Tensor) -> Tensor:
        projected = self.attend(self.norm1(x))
        rows, length, _ = projected.shape
        heads = (part.view(rows, length, 4, -1).transpose(1, 2) for part in projected.chunk(3, -1))
        attended = F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(rows, length, -1)
        return self.feed(self.norm2(x + self.project(attended)))  # type: ignore[no-any-return]


class Mixing(CausalBlock):
    """The mean over the positions is added between two pairs of layers."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + x.mean(1, keepdim=True)


def of_block(block: Callable[[], nn.Module], change: Callable[[Any], None] = lambda model: None) -> Job:
    def model() -> nn.Module:
        torch.manual_seed(18)
        built = Causal(8)
        built.drop = nn.Dropout(0.0)
        built.blocks = nn.ModuleList(block() for _ in range(2))
        change(built)
        return built

    return replace(sequences(), model=model)


def plan_of(job: Job, ranks: int) -> Any:
    division = division_of(job, ranks)
    return division.plan, sequence_parallel_plan(job, division.plan, ranks)


def test_blocks_are_found_with_the_layers_in_them() -> None:
    layers, plan = plan_of(sequences(), 2)
    assert [block.name for block in plan.blocks] == ["blocks.0", "blocks.1"]
    assert dim_of_layers(layers, plan.blocks) == dict.fromkeys(layers, 1)
    assert plan.names(sequences().model()) == ["blocks.*"]


def share_a_norm(model: Any) -> None:
    model.drop = model.blocks[1].norm1


def second_is_scaled(model: Any) -> None:
    model.blocks[1] = Scaled()


def test_the_layer_that_does_not_fit_is_named() -> None:
    with pytest.raises(UserError) as raised:
        plan_of(of_block(CausalBlock, second_is_scaled), 2)
    why = raised.value.message.fields["why"]
    assert (why.id, why.fields["block"]) == ("split_layers_do_not_fit_in_block", "blocks.1.attend")


@pytest.mark.parametrize(
    ("job", "ranks", "why"),
    [
        (sequences(length=6), 4, "sequence_does_not_divide"),
        (heads(), 2, "sequence_does_not_divide"),  # of 5 positions
        (of_block(OfInput), 2, "split_layers_do_not_fit_in_block"),
        (of_block(Fixed), 2, "attention_outside_of_split_layers"),
        (of_block(Mixing), 2, "positions_meet_outside_of_attention"),
        (of_block(CausalBlock, share_a_norm), 2, "block_shares_a_parameter"),
    ],
    ids=["length", "odd", "input", "fixed", "mixing", "shared"],
)
def test_what_has_no_chunks_is_refused(job: Job, ranks: int, why: str) -> None:
    with pytest.raises(UserError) as raised:
        plan_of(job, ranks)
    assert raised.value.message.id == "sequence_parallel_does_not_fit"
    assert raised.value.message.fields["why"].id == why
