"""Where the stages of a pipeline begin: what is found in a model, what is asked for, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from command import TESTS
from mutations.jobs import deep, heads
from samestep import Job, Recipe
from samestep.errors import UserError
from samestep.parallel.plan_trial import laid_out, memory_order
from samestep.parallel.stage_forward import StageForward, StageOutput, sizes_at
from samestep.parallel.stage_plan import balanced, check_micro_batches, ranks_of_stages, stage_plan
from samestep.rank.absent_modules import Outputs
from samestep.tasks.inspect.load import build


class Blocks(nn.Module):
    """Blocks between two other layers, called by `go`."""

    def __init__(self, go: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.last, self.go = nn.Linear(8, 3), go

    def forward(self, x: Tensor) -> Tensor:
        return self.go(self, x)


class Scaled(nn.Linear):
    """A layer that is called with a factor, too."""

    def forward(self, x: Tensor, *, factor: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * factor


class Conditioned(nn.Module):
    """Blocks that all read what a layer before them has computed: as the position bias of T5."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.condition = nn.Linear(8, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Scaled(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        factor, x = self.condition(x), self.first(x)
        for block in self.blocks:
            x = block(x, factor=factor)
        return x


Call = Callable[[nn.Module, Tensor], Tensor]


def plain(model: Any, x: Tensor, call: Call = lambda block, x: block(x)) -> Tensor:
    x = model.first(x)
    for block in model.blocks:
        x = call(block, x).relu()
    return model.last(x)  # type: ignore[no-any-return]


def reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)  # type: ignore[no-any-return]


def repeatable(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]


def dropped(block: nn.Module, x: Tensor) -> Tensor:
    """As layerdrop does."""
    return block(x) if torch.rand(()) > 0.5 else x


def skipping(model: Any, x: Tensor) -> Tensor:
    """What the first layer returns is needed again at the end, as in a U-Net."""
    x = first = model.first(x)
    for block in model.blocks:
        x = block(x)
    return model.last(x + first)  # type: ignore[no-any-return]


def keeping(model: Any, x: Tensor) -> Tensor:
    """What the first layer returned at the first call is needed again at the end: a rank does not have another's."""
    x = model.first(x)
    model.kept = getattr(model, "kept", x.detach())
    for block in model.blocks:
        x = block(x)
    return model.last(x + model.kept)  # type: ignore[no-any-return]


def repeated(model: Any, x: Tensor) -> Tensor:
    for _ in range(2):
        x = model.blocks[1](model.blocks[0](x))
    return model.last(x)  # type: ignore[no-any-return]


def deciding(model: Any, x: Tensor) -> Tensor:
    """Values decide what is computed."""
    x = model.first(x)
    for block in model.blocks:
        x = block(x) if x.sum() < 1e9 else x
    return model.last(x)  # type: ignore[no-any-return]


def changing(model: Any, x: Tensor) -> Tensor:
    """What a block has returned is changed in place."""
    x = model.first(x)
    for block in model.blocks:
        x = block(x).relu_()
    return model.last(x)  # type: ignore[no-any-return]


def job(model: Callable[[], nn.Module], parallel: Mapping[str, str] | None = None, **fields: Any) -> Job:
    inputs = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    return Job(
        model=model,
        criterion=lambda output, batch: output.square().mean(),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.1}),
        train=TensorDataset(inputs, inputs),
        global_batch=4,
        parallel=parallel,
        **fields,
    )


def sequence(layers: int = 4) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU())))


def nested() -> nn.Module:
    return nn.Sequential(sequence(2), nn.Sequential(nn.BatchNorm1d(8), sequence(2)))


def normed() -> nn.Module:
    """A model that cannot be copied, whose layers compute their weights before they are called."""
    torch.manual_seed(3)
    return nn.Sequential(*(nn.utils.weight_norm(nn.Linear(8, 8)) for _ in range(4)))


@pytest.mark.parametrize(
    ("model", "stages", "begins"),
    [
        (sequence, 2, ["6"]),
        (sequence, 3, ["3", "6"]),
        (nested, 2, ["1"]),
        (nested, 4, ["0.3", "1.0", "1.1"]),
        (lambda: Blocks(plain), 2, ["blocks.2"]),
        (lambda: Blocks(plain), 4, ["blocks.1", "blocks.2", "blocks.3"]),
        (lambda: Blocks(changing), 2, ["blocks.2"]),
        (lambda: Blocks(lambda model, x: plain(model, x, repeatable)), 2, ["blocks.2"]),
        (normed, 2, ["2"]),
        (lambda: nn.Sequential(*(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)) for _ in range(4))), 2, ["2"]),
        (Conditioned, 3, ["blocks.1", "blocks.2"]),
    ],
)
def test_the_blocks_of_a_model_are_found(model: Callable[[], nn.Module], stages: int, begins: list[str]) -> None:
    plan = stage_plan(job(model), stages)
    assert [cut.module for cut in plan.cuts] == begins


def test_what_a_stage_does_not_compute_is_sent_to_it() -> None:
    sent = [cut.leaves for cut in stage_plan(job(Conditioned), 3).cuts]
    assert sent == [(0, 1), (0, 1)]  # what the block before returns, and the factor
    assert [cut.leaves for cut in stage_plan(deep(), 2).cuts] == [(0,)]  # the mask is computed of the tokens


def test_what_is_sent_lies_in_memory_as_in_one_process() -> None:
    """Dropout draws value after value as they lie in memory."""
    blocks = (nn.Linear(8, 8), nn.Unflatten(1, (2, 4)), Transposed(), nn.Linear(4, 4), nn.Linear(4, 4))
    plan = stage_plan(job(lambda: nn.Sequential(*blocks), {"3": "stage"}), 2)
    assert [cut.orders for cut in plan.cuts] == [((2, 1, 0),)]
    received = laid_out(torch.arange(16.0).view(2, 2, 4), (2, 1, 0))
    assert torch.equal(received, torch.arange(16.0).view(2, 2, 4)) and memory_order(received) == [2, 1, 0]


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 2).contiguous().transpose(0, 2)


def test_tied_weights_are_of_several_stages_and_buffers_of_one() -> None:
    plan = stage_plan(deep(), 4)
    several = {name: stages for name, stages in plan.holders.items() if len(stages) > 1}
    assert several == {"embedding.weight": (0, 3)}
    assert plan.holders["blocks.2.norm.running_mean"] == (1,) and plan.draws
    said = plan.said(deep().model(), 4)
    assert said.id == "pipeline_ranks_divide_the_model" and said.fields["tied"] == ["embedding.weight"]


def test_a_plan_takes_no_random_numbers_from_the_training() -> None:
    before = torch.random.get_rng_state()
    stage_plan(heads(), 2)
    assert torch.equal(before, torch.random.get_rng_state())


def test_rows_that_a_forward_pass_changes_are_each_stages_own() -> None:
    asked = job(lambda: Blocks(lambda model, x: plain(model, x.mul_(2))))
    assert stage_plan(asked, 2).changes_rows and not stage_plan(job(lambda: Blocks(plain)), 2).changes_rows


def test_without_random_numbers_no_state_of_them_is_sent() -> None:
    assert not stage_plan(job(lambda: Blocks(plain)), 2).draws


def test_modules_that_are_named_begin_stages() -> None:
    given = {"last": "stage", "blocks.*": "colwise", "blocks.1": "stage"}
    assert [cut.module for cut in stage_plan(job(lambda: Blocks(plain), given), 3).cuts] == ["blocks.1", "last"]


@pytest.mark.parametrize(
    ("go", "parallel", "stages", "said"),
    [
        (plain, None, 5, "more_stages_than_blocks"),
        (repeated, None, 2, "more_stages_than_blocks"),
        (repeated, {"blocks.0": "stage"}, 2, "stage_begins_at_a_module_called_often"),
        (plain, {"layers.1": "stage"}, 2, "parallel_names_no_module"),
        (plain, {"blocks.*": "stage"}, 2, "parallel_begins_other_stages"),
        (lambda model, x: plain(model, x, reentrant), None, 2, "reentrant_checkpoint_is_not_cut"),
        (lambda model, x: plain(model, x, dropped), None, 2, "more_stages_than_blocks"),
        (lambda model, x: plain(model, x, dropped), {"blocks.2": "stage"}, 2, "stage_begins_at_a_module_called_often"),
        (skipping, None, 2, "stage_does_not_run_alone"),
        (keeping, None, 2, "stage_does_not_run_alone"),
        (deciding, None, 2, "stage_does_not_run_alone"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    go: Callable[[Any, Tensor], Tensor], parallel: Mapping[str, str] | None, stages: int, said: str
) -> None:
    with pytest.raises(UserError) as raised:
        stage_plan(job(lambda: Blocks(go), parallel), stages)
    assert raised.value.message.id == said


@pytest.mark.parametrize(
    ("stage", "leaving", "said", "module"),
    [
        (0, "blocks.2", "stage_module_is_not_called", "blocks.2"),
        (1, "blocks.2", "stage_module_is_not_called", "blocks.2"),
        (1, "values", "stage_does_not_run_alone", "blocks.2"),
        (0, "", "", ""),
    ],
)
def test_a_choice_that_the_trial_did_not_meet_names_the_stage_and_the_module(
    stage: int, leaving: str, said: str, module: str
) -> None:
    def go(model: Any, x: Tensor) -> Tensor:
        x = model.first(x)
        for number, block in enumerate(model.blocks):
            if f"blocks.{number}" != leaving and (leaving != "values" or bool(x.sum() < 1e9)):
                x = block(x)
        return model.last(x)  # type: ignore[no-any-return]

    model, x = Blocks(go), torch.randn(2, 8)
    names = (None, "blocks.2") if stage == 0 else ("blocks.2", None)
    forward = StageForward(model, stage, *names, device="cpu")
    for name, block in model.named_children():  # of the other stage
        if stage and name == "first":
            block.to("meta")
    with pytest.raises(UserError if said else StageOutput) as raised:  # type: ignore[call-overload]
        forward.run(lambda: model(x), lambda absent: {n: torch.randn(t.shape) for n, t in absent.items()})
    if said:
        assert raised.value.message.id == said and raised.value.message.fields["module"] == module
        with pytest.raises(UserError) as raised:
            sizes_at(lambda: model(x), model, {"blocks.2": (0,)}, "cpu", Outputs())
        assert raised.value.message.id == said


@pytest.mark.parametrize(
    ("schedule", "ranks", "fewest", "said"),
    [
        ("1F1B", 4, 3, "fewer_micro_batches_than_stages"),
        ("DualPipeV", 2, 3, "fewer_micro_batches_than_stages"),
        ("Interleaved1F1B", 2, 5, "micro_batches_do_not_divide"),
        ("GPipe", 2, 11, "more_micro_batches_than_rows"),
        ("GPipe", 2, -1, "micro_batches_per_step"),
    ],
)
def test_micro_batches_that_a_schedule_does_not_take_are_refused(
    schedule: str, ranks: int, fewest: int, said: str
) -> None:
    with pytest.raises(UserError) as raised:
        check_micro_batches(deep(), schedule, ranks_of_stages(schedule, ranks, 2), replicas=1, fewest=fewest)
    assert raised.value.message.id == said


def test_a_state_that_rows_carry_is_refused() -> None:
    carrying = deep()
    object.__setattr__(carrying, "carry_state", True)
    with pytest.raises(UserError) as raised:
        check_micro_batches(carrying, "1F1B", [0, 1], replicas=1, fewest=4)
    assert raised.value.message.id == "pipeline_carries_no_state"


def test_stages_of_a_rank() -> None:
    assert ranks_of_stages("1F1B", 3, 2) == [0, 1, 2]
    assert ranks_of_stages("Interleaved1F1B", 2, 3) == [0, 1, 0, 1, 0, 1]
    assert ranks_of_stages("ZBVZeroBubble", 2, 3) == [0, 1, 1, 0]
    with pytest.raises(UserError) as raised:
        ranks_of_stages("1F2B", 2, 2)
    assert raised.value.message.id == "pipeline_has_no_such_schedule"


@pytest.mark.parametrize(
    ("operations", "stages", "begins"),
    [
        ([1] * 4, 4, [1, 2, 3]),
        ([1] * 10, 4, [2, 5, 8]),
        ([1, 1, 1, 10], 2, [3]),  # a heavy head is a stage of its own
        ([9, 1, 1, 1, 6], 3, [1, 4]),
        ([0] * 6, 3, [2, 4]),  # blocks of what is not counted
        ([5], 1, []),
    ],
)
def test_stages_have_as_much_to_compute_as_each_other(operations: list[int], stages: int, begins: list[int]) -> None:
    assert balanced(operations, stages) == begins


def test_the_operations_of_a_heavy_block_decide() -> None:
    """Three small blocks and a large one: the large one is a stage of its own, whatever the number of blocks."""

    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [(8, 8), (8, 8), (8, 512), (512, 512)]
            self.blocks = nn.Sequential(*(nn.Linear(*width) for width in widths), nn.Linear(512, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(x)  # type: ignore[no-any-return]

    rows = TensorDataset(torch.randn(8, 8), torch.randint(0, 3, (8,)))
    job = Job(
        Uneven,
        lambda output, batch: F.cross_entropy(output, batch.targets),
        Recipe(torch.optim.SGD, {"lr": 0.1}),
        rows,
        8,
    )
    assert [cut.module for cut in stage_plan(job, 2).cuts] == ["blocks.3"]


def test_a_gradient_that_is_zero_but_for_rounding_is_no_difference() -> None:
    """That of attention's key biases, where the loss and the stages differ by rounding."""
    divided = build(f"{TESTS}/conformance/jobs_divided.py:job", {"arch": "batchnorm"})
    assert stage_plan(divided, 2, "cpu").cuts[0].module == "blocks.2"
