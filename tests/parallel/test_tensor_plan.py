"""How tensor parallel ranks divide a model: what is found in it, what is asked for, and what is refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from mutations.jobs import heads
from said import refuses
from samestep import Job, Recipe
from samestep.errors import Refused, UserError
from samestep.parallel.tensor_plan import division_of


class Fused(nn.Module):
    """Query, key and value in one layer. heads: how many, and their size. drop: of the attention's weights."""

    def __init__(self, heads: tuple[int, int], drop: float = 0.0) -> None:
        super().__init__()
        self.attend, self.project, self.heads, self.drop = nn.Linear(8, 24), nn.Linear(8, 8), heads, drop

    def forward(self, x: Tensor) -> Tensor:
        rows, x = len(x), torch.stack([x, x.flip(-1), x.cos()], 1)
        parts = (part.view(rows, 3, *self.heads).transpose(1, 2) for part in self.attend(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(*parts, dropout_p=self.drop if self.training else 0.0)
        return self.project(attended.transpose(1, 2).reshape(rows, 3, -1)).mean(1)  # type: ignore[no-any-return]


class Gated(nn.Module):
    """A gate and what it multiplies in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(8, 24), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Skipped(nn.Module):
    """The columns of the first layer are needed whole beside the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return self.second(hidden) + hidden.flip(-1)  # type: ignore[no-any-return]


class Twice(nn.Module):
    """A layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(torch.relu(self.first(x)))))  # type: ignore[no-any-return]


class Declared(nn.Module):
    """A model with a tp_plan of its own, as Hugging Face's have; one layer is tied, and one has an odd size."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head, self.odd = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 4), nn.Linear(4, 3)
        self.first, self.tied = nn.Linear(8, 8), nn.Linear(8, 8)
        self.tied.weight = self.first.weight
        styles = {"head": "colwise_rep", "odd": "colwise_gather_output", "tied": "colwise", "first": "replicated"}
        self.tp_plan = {"up": "colwise", "do*": "rowwise", **styles}

    def forward(self, x: Tensor) -> Tensor:
        return self.odd(self.head(self.down(torch.relu(self.up(self.tied(self.first(x)))))))  # type: ignore[no-any-return]


class Beside(nn.Module):
    """What is between two layers is also left on the module, for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        hidden = torch.relu(self.first(x))
        return self.second(hidden), lambda: hidden.square().mean()


def zero(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    return layer


class Reading(nn.Module):
    """Two pairs of layers. also: (the model, its input) -> what is added to the output."""

    def __init__(
        self,
        also: Callable[[Any, Tensor], Tensor | float] = lambda model, x: 0.0,
        first: Callable[[nn.Linear], nn.Module] = lambda layer: layer,
    ) -> None:
        super().__init__()
        self.first, self.second = first(nn.Linear(8, 12)), nn.Linear(12, 8)
        self.norm, self.third, self.fourth, self.also = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 4), also

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.second(F.relu(self.first(x), inplace=True)))
        return self.fourth(torch.relu(self.third(x))) + self.also(self, x)  # type: ignore[no-any-return]


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Embedded(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(6, 8, **options), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.embedding((x > 0).long()).mean(1))  # type: ignore[no-any-return]


def with_hook(layer: nn.Linear) -> nn.Module:
    layer.register_forward_hook(lambda *_: None)
    return layer


def with_gradient_hook(layer: nn.Linear) -> nn.Module:
    layer.weight.register_hook(lambda gradient: gradient * 2)
    return layer


def with_few_rows(model: Any, x: Tensor) -> float:
    if len(x) < 3:
        raise ValueError("three rows or more")
    return 0.0


def job(model: Callable[[], nn.Module], parallel: Mapping[str, str] | None = None) -> Job:
    inputs = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    return Job(
        model=model,
        criterion=lambda output, batch: output.square().mean(),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.1}),
        train=TensorDataset(inputs, inputs),
        global_batch=4,
        parallel=parallel,
    )


def sequence(*between: nn.Module, out: int = 3) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(8, 12), *between, nn.Linear(12, out))


PAIR = {"0": "colwise", "2": "rowwise"}
TWO_PAIRS = {"0": "colwise", "1": "rowwise", "2": "colwise", "3": "rowwise"}


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (sequence(nn.GELU()), PAIR),
        (sequence(nn.Softsign()), PAIR),
        (
            lambda: nn.Sequential(nn.Linear(8, 12), nn.ReLU(), zero(nn.Linear(12, 8))),
            PAIR,
        ),  # as of a new residual block
        (lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), TWO_PAIRS),
        (sequence(nn.LayerNorm(12), out=4), {"2": "colwise_gather", "0": "colwise_gather"}),
        (sequence(nn.Softmax(-1), out=4), {"2": "colwise_gather", "0": "colwise_gather"}),
        (sequence(nn.PReLU(12), out=4), {"2": "colwise_gather", "0": "colwise_gather"}),
        (sequence(nn.BatchNorm1d(12), out=4), {"2": "colwise_gather", "0": "colwise_gather"}),
        (lambda: Fused((-1, 4)), {"attend": "colwise_3", "project": "rowwise"}),
        (lambda: Fused((2, -1)), {"attend": "colwise_gather", "project": "colwise_gather"}),
        (Gated, {"both": "colwise_2", "down": "rowwise"}),
        (Skipped, {"first": "colwise_gather", "second": "colwise_gather"}),
        (Twice, {"second": "colwise_gather"}),
    ],
    ids=[
        "gelu",
        "softsign",
        "zeros",
        "four",
        "norm",
        "softmax",
        "prelu",
        "batchnorm",
        "fused",
        "fixed",
        "gated",
        "skipped",
        "twice",
    ],
)
def test_what_can_be_split_is_found(model: Callable[[], nn.Module], found: Mapping[str, str]) -> None:
    assert division_of(job(model), 2).plan == found


def test_attention_is_split_by_heads_and_what_is_tied_stays_whole() -> None:
    columns, rows = ("query", "key", "value", "gate", "up"), ("project", "down")
    of_block = {name: "colwise" for name in columns} | {name: "rowwise" for name in rows}
    expected = {f"blocks.{number}.{name}": style for number in (0, 1) for name, style in of_block.items()}
    assert division_of(heads(), 2).plan == expected


def test_a_models_own_plan_is_taken_where_it_adds_up() -> None:
    plan = {"up": "colwise", "down": "rowwise", "head": "colwise_gather"}
    assert division_of(job(Declared), 2).plan == plan

    def nested() -> nn.Module:
        return nn.Sequential(Declared())

    assert division_of(job(nested), 2).plan == {f"0.{name}": style for name, style in plan.items()}

    def wrong() -> nn.Module:
        model = Declared()
        model.tp_plan = {"up": "colwise", "down": "colwise"}
        return model

    found = {"up": "colwise", "down": "rowwise", "head": "colwise", "odd": "rowwise"}
    assert division_of(job(wrong), 2).plan == found


def test_blocks_of_a_list_that_are_unlike_are_tried_by_themselves() -> None:
    def model() -> nn.Module:
        def block(p: float) -> nn.Module:
            return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.Dropout(p), nn.Linear(12, 8))

        blocks = [block(p) for p in (0.0, 0.5, 0.0)]
        return nn.Sequential(OrderedDict(blocks=nn.Sequential(*blocks)))

    division = division_of(job(model), 2)
    assert {*division.plan} == {"blocks.0.1", "blocks.0.3", "blocks.2.1", "blocks.2.3"}
    assert division.random == ["blocks.1.3"]


def test_heads_of_a_layer_for_query_key_and_value_are_split_where_the_ranks_divide_them() -> None:
    gathered = {"attend": "colwise_gather", "project": "colwise_gather"}
    assert division_of(job(lambda: Fused((-1, 4))), 4).plan == gathered  # of 2 heads
    asked = {"attend": "colwise_3", "project": "rowwise"}
    assert division_of(job(lambda: Fused((-1, 4)), asked), 2).plan == asked
    for parallel, ranks in ((asked, 4), ({**asked, "attend": "colwise"}, 2), ({**asked, "attend": "colwise_2"}, 2)):
        with pytest.raises(UserError) as raised:
            division_of(job(lambda: Fused((-1, 4)), parallel), ranks)
        assert raised.value.message.id == "parts_of_split_layers_do_not_add_up"
    with pytest.raises(UserError) as raised:
        division_of(job(lambda: Fused((-1, 4)), asked), 3)
    assert raised.value.message.id == "layer_does_not_divide"


def test_a_dropout_inside_of_such_attention_leaves_it_whole() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.norm, self.gated = Fused((-1, 4), drop=0.5), nn.LayerNorm(8), Gated()

        def forward(self, x: Tensor) -> Tensor:
            return self.gated(self.norm(self.attention(x)))  # type: ignore[no-any-return]

    division = division_of(job(Both), 2)
    assert division.plan == {"gated.both": "colwise_2", "gated.down": "rowwise"}
    assert division.random == ["attention.project"]


def test_what_the_loss_reads_beside_the_output_is_not_split() -> None:
    beside = replace(job(Beside), criterion=lambda output, batch: output[0].mean() + output[1]())
    assert division_of(beside, 2).plan == {"first": "colwise_gather", "second": "colwise_gather"}


def test_a_plan_takes_no_random_numbers_from_the_training() -> None:
    before = torch.random.get_rng_state()
    division_of(job(sequence(nn.GELU())), 2)
    assert torch.equal(before, torch.random.get_rng_state())


def test_layers_around_a_dropout_stay_whole_and_this_is_said() -> None:
    def model() -> nn.Module:
        after = [nn.LayerNorm(3), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)]
        return nn.Sequential(*sequence(nn.Dropout(0.5))().children(), *after)

    division = division_of(job(model), 2)
    assert division.plan == {"4": "colwise", "6": "rowwise"}
    said = division.said(model(), 2)
    assert said.id == "tensor_ranks_divide_the_model"
    assert dict(said.fields) == {
        "ranks": 2,
        "plan": "4 colwise, 6 rowwise",
        "split": 26,
        "total": 179,
        "random": ["2"],
        "whole": ["0"],
        "chunks": None,
        "output": None,
        "unfit": None,
    }


@pytest.mark.parametrize(
    ("model", "parallel", "ranks", "said"),
    [
        (sequence(nn.GELU()), None, 5, "layer_does_not_divide"),
        (sequence(nn.LayerNorm(12)), None, 5, "no_layer_can_be_split"),
        (lambda: nn.Sequential(nn.Unflatten(1, (8, 1)), nn.Conv1d(8, 8, 1)), None, 2, "no_layer_can_be_split"),
        (sequence(nn.GELU()), {"first": "colwise"}, 2, "parallel_names_no_layer"),
        (sequence(nn.GELU()), PAIR, 5, "layer_does_not_divide"),
        (sequence(nn.GELU()), {"0": "colwise"}, 2, "parts_of_split_layers_do_not_add_up"),
        (sequence(nn.GELU()), {"2": "rowwise"}, 2, "parts_of_split_layers_do_not_add_up"),
        (sequence(nn.LayerNorm(12)), PAIR, 2, "parts_of_split_layers_do_not_add_up"),
        (sequence(nn.Dropout(0.5)), PAIR, 2, "random_numbers_inside_of_split_layers"),
        (Skipped, {"first": "colwise", "second": "rowwise"}, 2, "parts_of_split_layers_do_not_add_up"),
    ],
)
def test_what_cannot_be_split_is_refused(
    model: Callable[[], nn.Module], parallel: Mapping[str, str] | None, ranks: int, said: str
) -> None:
    with pytest.raises(UserError) as raised:
        division_of(job(model, parallel), ranks)
    assert raised.value.message.id == said


@pytest.mark.parametrize(
    ("parallel", "ranks", "said"),
    [
        (None, 3, "layer_splits_over_other_ranks"),  # 4 heads
        ({"embedding": "rowwise"}, 11, "layer_is_not_split"),
        ({"embedding": "colwise"}, 11, "embedding_is_split_rowwise"),
        ({"blocks.*.query": "colwise", "blocks.*.project": "rowwise"}, 2, "parts_of_split_layers_do_not_add_up"),
    ],
)
def test_heads_and_vocabulary_must_divide(parallel: Mapping[str, str] | None, ranks: int, said: str) -> None:
    with pytest.raises(UserError) as raised:
        division_of(replace(heads(), parallel=parallel), ranks)
    assert raised.value.message.id == said


WHOLE_BY: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: Reading(lambda model, x: F.linear(x, model.first.weight)[:, :4]), "weight_is_read_outside_of_its_layer"),
    (lambda: Reading(lambda model, x: model.first.weight.shape[0]), "weight_is_read_outside_of_its_layer"),
    (
        lambda: Reading(lambda model, x: 1e-6 * model.first.bias.square().sum()),
        "weight_is_read_outside_of_its_layer",
    ),
    (lambda: Reading(lambda model, x: model.first(input=x)[:, :4]), "layer_is_called_by_keyword"),
    (lambda: Reading(first=nn.utils.parametrizations.weight_norm), "weight_is_computed_in_forward"),
    (lambda: Reading(first=nn.utils.parametrizations.spectral_norm), "weight_is_computed_in_forward"),
    (lambda: Reading(first=nn.utils.spectral_norm), "weight_is_computed_in_forward"),
    (lambda: Reading(first=lambda layer: OwnForward(8, 12)), "weight_is_computed_in_forward"),
    (lambda: Reading(first=with_hook), "layer_has_hooks"),
    (lambda: Reading(first=with_gradient_hook), "layer_has_hooks"),
]


@pytest.mark.parametrize(("model", "why"), WHOLE_BY)
def test_a_layer_that_torch_does_not_split_stays_whole_and_is_refused_where_it_is_asked_for(
    model: Callable[[], nn.Module], why: str
) -> None:
    division = division_of(job(model), 2)
    assert division.plan == {"third": "colwise", "fourth": "rowwise"}
    assert division.unfit["first"].id == why
    assert [said.fields["why"].id for said in division.said(model(), 2).fields["unfit"]] == [why]
    with pytest.raises(UserError) as raised:
        division_of(job(model, {"first": "colwise_gather"}), 2)
    assert raised.value.message.id == "layer_is_not_split"
    assert raised.value.message.fields["why"].id == why


@pytest.mark.parametrize(
    "also",
    [lambda model, x: 0.0, lambda model, x: x.to(model.first.weight.dtype)[:, :4], lambda model, x: x.detach()[:, :4]],
)
def test_what_a_part_and_the_whole_have_alike_may_be_read(also: Callable[[Any, Tensor], Tensor]) -> None:
    division = division_of(job(lambda: Reading(also)), 2)
    pairs = {"first": "colwise", "second": "rowwise", "third": "colwise", "fourth": "rowwise"}
    assert division.plan == pairs and not division.unfit
    assert division.changed == {"first"}  # by a relu in place, of which torch is given a copy


def test_a_loss_that_reads_all_weights_leaves_nothing_to_split() -> None:
    penalised = Reading(lambda model, x: 1e-6 * sum(p.square().sum() for p in model.parameters()))
    with pytest.raises(UserError) as raised:
        division_of(job(lambda: penalised), 2)
    assert raised.value.message.id == "no_layer_can_be_split"
    assert raised.value.message.fields["unfit"].fields["why"].id == "weight_is_read_outside_of_its_layer"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, ""),
        ({"padding_idx": 1}, ""),
        ({"scale_grad_by_freq": True}, ""),
        ({"max_norm": 1.0}, "embedding_has_max_norm"),
    ],
)
def test_an_embedding_is_split_unless_it_changes_its_weight(options: Mapping[str, Any], why: str) -> None:
    asked = job(lambda: Embedded(**options), {"embedding": "rowwise"})
    if not why:
        with pytest.raises(UserError) as raised:
            division_of(asked, 4)  # 6 tokens
        assert raised.value.message.id == "layer_does_not_divide"
        assert division_of(asked, 2).plan == {"embedding": "rowwise"}
        return
    with pytest.raises(UserError) as raised:
        division_of(asked, 2)
    assert raised.value.message.fields["why"].id == why


@pytest.mark.parametrize("parallel", [{}, {"first": "stage"}], ids=str)
def test_what_names_no_layer_to_split_is_as_nothing(parallel: Mapping[str, str]) -> None:
    assert division_of(job(Reading, parallel), 2).plan == division_of(job(Reading), 2).plan
    both = {**parallel, "third": "colwise_gather"}
    assert division_of(job(Reading, both), 2).plan == {"third": "colwise_gather"}


def test_a_layer_that_is_the_whole_model_has_a_name() -> None:
    division = division_of(job(lambda: nn.Linear(8, 4)), 2)
    assert division.plan == {"": "colwise_gather"}
    assert division.said(nn.Linear(8, 4), 2).fields["plan"] == "Linear colwise_gather"


def test_a_layer_that_is_called_often_is_split_where_it_is_asked_for() -> None:
    asked = {"first": "colwise_gather"}
    assert division_of(job(Twice, asked), 2).plan == asked


def test_a_job_that_refuses_few_rows_is_tried_on_those_of_a_batch() -> None:
    assert set(division_of(job(lambda: Reading(with_few_rows)), 2).plan) == {"first", "second", "third", "fourth"}


def test_a_forward_that_computes_a_derivative_is_refused_for_that() -> None:
    def slope(model: nn.Module, batch: Any) -> Tensor:
        x = batch.inputs.clone().requires_grad_(True)
        return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]

    with refuses("plan_is_tried_without_derivatives", Refused):
        division_of(replace(job(sequence(nn.Tanh())), forward=slope), 2, "cpu")


def test_what_the_job_raises_is_told_as_its_own() -> None:
    def failing(model: Any, x: Tensor) -> Tensor:
        raise KeyError("no such column")

    with pytest.raises(UserError) as raised:
        division_of(job(lambda: Reading(failing)), 2)
    said = raised.value.message
    assert said.id == "function_of_the_job_raised" and said.fields["error"] == "KeyError: 'no such column'"


def test_a_model_that_does_not_take_random_weights_has_its_own() -> None:
    def of_new_layers(model: Any, x: Tensor) -> float:
        if model.fourth.weight.detach().abs().max() > 0.4:
            raise ValueError("the weights are too large")
        return 0.0

    assert division_of(job(lambda: Reading(of_new_layers)), 2).plan == {"first": "colwise", "second": "rowwise"}


def test_single_layers_are_gathered_where_they_are_asked_for() -> None:
    asked: dict[str, Any] = {"0": "colwise_gather"}
    assert division_of(job(sequence(nn.LayerNorm(12)), asked), 3).plan == asked
