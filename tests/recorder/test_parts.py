"""The recorder's parts, one by one: losses, sums, windows, loaders, clipping, batches. Whole scripts: test_check.py."""

from __future__ import annotations

import functools
import random
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from samestep.message import message
from samestep.rank.hooks import Hooks
from samestep.recorder.batches import (
    CannotJoin,
    RowOrder,
    copied,
    holds_loss,
    is_joined,
    is_rescaled_by_rank,
    joined,
    lists_of_rows,
    order_of_rows,
    order_of_values,
)
from samestep.recorder.call_sites import CallSites
from samestep.recorder.loaders import rows_of
from samestep.recorder.losses import terms
from samestep.recorder.parameters import precisions
from samestep.recorder.patches import patch_clipping, patch_forwards
from samestep.recorder.random_numbers import randomness
from samestep.recorder.recorder import Recorder
from samestep.recorder.replay_player import ReplayPlayer
from samestep.recorder.replay_saver import ReplayData, ReplaySaver
from samestep.recorder.window import MicroBatch, Window, compress
from samestep.records.script import BUCKETS, COMPRESSED, MICRO_BATCHES, ClipRecord, LossRecord
from samestep.records.script_plan import END, START, ReplayPlan, ReplayRecord, ScriptPlan
from samestep.records.tensor_files import write_state
from samestep.world import World

Batch = namedtuple("Batch", "x y")


# Losses


class Own(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return values.mean()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.expand(6)


TARGETS = torch.tensor([0, 1, -100])
MASK = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0])
LOSSES: list[tuple[Callable[[Tensor], Tensor], list[LossRecord]]] = [
    (lambda v: v.mean(), [LossRecord(1.0, "mean", 6, "Mean")]),
    (lambda v: v.sum(), [LossRecord(1.0, "sum", 6, "Sum")]),
    (lambda v: -v.mean(), [LossRecord(-1.0, "mean", 6, "Mean", [-1.0])]),
    (lambda v: v.mean() / 4, [LossRecord(0.25, "mean", 6, "Mean", [0.25])]),
    (lambda v: 3 * v.sum() / torch.tensor(6.0), [LossRecord(0.5, "sum", 6, "Sum", [1 / 6, 3.0])]),
    (
        lambda v: v.mean() - 0.5 * v[:2].sum(),
        [LossRecord(1.0, "mean", 6, "Mean"), LossRecord(-0.5, "sum", 2, "Sum", [-1.0, 0.5])],
    ),
    (
        lambda v: torch.add(v.mean(), v[:3].mean(), alpha=2.0),
        [LossRecord(1.0, "mean", 6, "Mean"), LossRecord(2.0, "mean", 3, "Mean", [2.0])],
    ),
    (lambda v: (v.mean() + 1.0).clone(), [LossRecord(1.0, "mean", 6, "Mean")]),
    (lambda v: F.cross_entropy(v.view(3, 2), TARGETS), [LossRecord(1.0, "mean", 2, "NllLoss", classes=2)]),
    (
        lambda v: F.cross_entropy(v.view(3, 2), TARGETS, reduction="sum"),
        [LossRecord(1.0, "sum", 2, "NllLoss", classes=2)],
    ),
    (lambda v: (v**2 * MASK).sum() / MASK.sum(), [LossRecord(0.25, "sum", 4, "Sum", [0.25])]),
    (lambda v: (v**2 * (MASK + 1)).sum(), [LossRecord(1.0, "sum", 6, "Sum")]),
    (lambda v: F.mse_loss(v, torch.zeros(6)), [LossRecord(1.0, "mean", 6, "MseLoss")]),
]


@pytest.mark.parametrize(("loss", "expected"), LOSSES, ids=range(len(LOSSES)))
def test_a_loss_is_a_combination_of_means_and_sums(
    loss: Callable[[Tensor], Tensor], expected: list[LossRecord]
) -> None:
    assert terms(loss(torch.ones(6, requires_grad=True))) == expected


@pytest.mark.parametrize("loss", [Own.apply, lambda v: v.mean() * v.sum(), lambda v: 1 / v.mean(), lambda v: v.max()])
def test_another_loss_is_unknown(loss: Callable[[Tensor], Tensor]) -> None:
    (term,) = terms(loss(torch.ones(6, requires_grad=True)))
    assert term.reduction == "unknown"


# Gradients


def test_sums_are_linear_and_no_element_is_lost() -> None:
    few = torch.randn(3, 5)
    assert torch.equal(compress(few), few.reshape(-1).double())
    many = [torch.randn(2, 3 * BUCKETS - 7, dtype=torch.float64) for _ in range(2)]
    assert compress(many[0]).shape == (BUCKETS,)
    torch.testing.assert_close(compress(sum(many) / 2), (compress(many[0]) + compress(many[1])) / 2)  # type: ignore[operator, arg-type]
    one = torch.zeros(6 * BUCKETS - 14)
    for place in (0, 1, BUCKETS, len(one) - 1):
        one.zero_()[place] = 1.0
        assert compress(one).abs().sum() == 1.0


def test_what_is_moved_within_a_bucket_is_seen() -> None:
    """By the random signs: an element that is exchanged for another one of its bucket leaves no sum as it was."""
    moved = []
    for other in range(1, 20):
        pair = torch.zeros(20 * BUCKETS)
        pair[0], pair[other * BUCKETS] = 1.0, -1.0
        moved.append(bool(compress(pair).any()))
    assert 4 <= sum(moved) <= 15


def test_of_many_micro_batches_the_last_are_added_up() -> None:
    window = Window()
    for number in range(MICRO_BATCHES + 3):
        window.current()
        window.add("w", torch.tensor([float(number)]))
        window.add("w", torch.tensor([0.5]))  # a weight that is used twice
        window.done = len(window.micro_batches)
    kept = {number: float(value) for number, value in window.local["w"].items()}
    assert kept == {**{n: n + 0.5 for n in range(MICRO_BATCHES - 1)}, MICRO_BATCHES - 1: 7.5 + 8.5 + 9.5 + 10.5}


def test_micro_batches_that_are_cleared_are_counted_and_what_has_begun_stays() -> None:
    window = Window([MicroBatch(["a"]), MicroBatch(["b"]), MicroBatch(["c"])], done=2, local={"w": {0: torch.ones(1)}})
    window.clear()
    window.clear()
    assert (window.cleared, window.done, window.local) == (2, 0, {})
    assert [each.rows for each in window.micro_batches] == [["c"]] and window.current().rows == ["c"]


def test_without_a_backward_a_clip_is_not_before_one() -> None:
    window = Window([MicroBatch(["a"])], clips=[ClipRecord(0, 4, 4, 1.0)])  # the gradients are of torch.autograd.grad
    assert [clip.after for clip in window.clip_records()] == [1]
    window.done = 1
    assert [clip.after for clip in window.clip_records()] == [0]


def test_what_is_removed_is_not_lost_where_the_same_rows_are_trained_in_the_step() -> None:
    window = Window(
        [MicroBatch(["a", "b"])], done=1
    )  # sharpness-aware minimization: a first gradient moves the weights
    window.clear()
    assert window.cleared == 1
    window.current().rows = ["a", "b"]
    assert window.cleared == 0
    window.removed += [MicroBatch(["b", "c"]), MicroBatch()]
    assert window.cleared == 2


# Patches


def test_clipping_is_told_with_its_parameters_and_its_norm(hooks: Hooks) -> None:
    told: list[tuple[int, float | None]] = []
    patch_clipping(hooks, lambda parameters, limit: told.append((len(parameters), limit)))
    weights = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.full((1,), 2.0)
    nn.utils.clip_grad_norm_((each for each in weights), 1.5)  # a generator can be read once
    assert sum(float(each.grad) ** 2 for each in weights if each.grad is not None) == pytest.approx(1.5**2, rel=1e-4)
    nn.utils.clip_grad_norm_(parameters=weights[:2], max_norm=1.0)
    nn.utils.clip_grad_norm_(weights[0], 1.0, norm_type=float("inf"))
    nn.utils.clip_grad_norm_(weights, 1.0, 1.0)
    nn.utils.clip_grad_value_(weights, clip_value=0.1)
    nn.utils.clip_grads_with_norm_(weights, 2.0, nn.utils.get_total_norm([weight.grad for weight in weights]))
    assert told == [(3, 1.5), (2, 1.0), (1, None), (3, None), (3, None), (3, 2.0)]
    assert all(float(each.grad) < 0.11 for each in weights if each.grad is not None)


def test_only_the_outermost_forward_is_seen_and_none_of_a_backward(hooks: Hooks) -> None:
    seen: list[str] = []

    def around(call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        seen.append(type(module).__name__)
        return call(*args, **kwargs)

    patch_forwards(hooks, around)
    inner = nn.Linear(3, 3)
    outer = nn.Sequential(nn.Sequential(inner), nn.ReLU())
    outer(torch.ones(2, 3))
    assert seen == ["Sequential"]
    checkpoint(inner, torch.ones(2, 3), use_reentrant=False).sum().backward()  # type: ignore[no-untyped-call]
    assert seen == ["Sequential", "Linear"]
    with pytest.raises(RuntimeError):
        outer(torch.ones(2, 4))
    outer(torch.ones(2, 3))
    assert seen == ["Sequential", "Linear", "Sequential", "Sequential"]  # also after an error


def test_a_forward_inside_a_transform_of_torch_func_is_passed_by(hooks: Hooks) -> None:
    """Its tensors have no storage: to read their rows is an error."""
    patch_forwards(hooks, lambda call, module, args, kwargs: rows_of(args))
    layer, rows = nn.Linear(3, 3), torch.ones(2, 3)
    found = torch.func.grad(lambda weight: torch.func.functional_call(layer, {"weight": weight}, rows).sum())
    assert found(layer.weight.detach()).shape == (3, 3)
    assert torch.func.vmap(layer)(rows).shape == (2, 3)
    assert len(layer(rows)) == 2


def test_communication_hooks_tell_what_they_round_to() -> None:
    def other() -> None: ...

    def module(*hooks: Any) -> Any:
        return SimpleNamespace(_comm_hooks=[(hook, None) for hook in hooks])

    halved = default_hooks.fp16_compress_hook
    wrapped = default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)
    assert precisions([module(halved), nn.Linear(1, 1)], []) == {"float16"}
    assert precisions([module(wrapped)], []) == {"bfloat16"}
    assert precisions([module(powerSGD_hook)], []) == {COMPRESSED}
    assert precisions([module(default_hooks.allreduce_hook, other)], [torch.ones(1)]) == {"float32"}


# Batches


def test_batches_are_joined_and_split_again() -> None:
    parts = [
        {"x": torch.full((size, 2), float(size)), "pair": Batch(torch.ones(size), [size]), "t": torch.tensor(1.0)}
        for size in (2, 3)
    ]
    whole = joined(parts)
    assert isinstance(whole["pair"], Batch) and whole["pair"].y == [2, 3] and float(whole["t"]) == 1.0
    order = RowOrder([2, 3], [*range(5)])
    for number, part in enumerate(parts):
        assert torch.equal(order.rows_of_rank(whole, number)["x"], part["x"])
        assert torch.equal(order.rows_of_rank(whole, number)["pair"].x, part["pair"].x)
    with pytest.raises(CannotJoin) as shapes:
        joined([torch.ones(2, 3), torch.ones(2, 4)])
    assert shapes.value.why == message("rows_of_different_shapes")
    with pytest.raises(CannotJoin) as scalars:
        joined([torch.tensor(1.0), torch.tensor(2.0)])
    assert scalars.value.why == message("scalars_differ_between_ranks")


def test_a_models_outputs_for_each_rank_are_joined() -> None:
    order = RowOrder([2, 1], [0, 1, 2])
    outputs = [(torch.tensor(1.0), torch.ones(2, 3)), (torch.tensor(2.0), torch.ones(1, 3))]
    loss, logits = order.joined_outputs(outputs)
    assert float(loss) == 1.5 and logits.shape == (3, 3)
    assert holds_loss({"loss": torch.ones((), requires_grad=True)}) and holds_loss(
        (None, torch.ones((), requires_grad=True))
    )
    assert not holds_loss({"loss": torch.ones(())}) and not holds_loss(torch.ones(2, requires_grad=True))


def test_rows_that_a_script_joins_itself_are_found_again() -> None:
    views = [["a0", "a1", "A0", "A1"], ["b0", "b1", "B0", "B1"]]  # of each rank: one view, then the other
    order = order_of_rows(["a0", "a1", "b0", "b1", "A0", "A1", "B0", "B1"], views)
    assert order == RowOrder([4, 4], [0, 1, 4, 5, 2, 3, 6, 7])
    assert order_of_rows(["b1", "a0", "b0", "B0", "B1", "a1", "A0", "A1"], views) is not None
    assert order_of_rows(["a0", "a1", "b0", "b1", "A0", "A1", "B0", "C1"], views) is None
    # One row twice, as padding is: each of the two is used once.
    assert order_of_rows(["x", "y", "x"], [["x", "x"], ["y"]]) == RowOrder([2, 1], [0, 2, 1])


def test_rows_that_are_computed_are_found_again_by_their_values() -> None:
    ranks = [(torch.rand(4, 3), torch.arange(4)), (torch.rand(4, 3), torch.arange(4, 8))]
    places = [0, 1, 4, 5, 2, 3, 6, 7]
    rows, labels = (torch.cat(parts)[places] for parts in zip(*ranks))
    assert order_of_values((rows * (1 + 1e-6), labels), ranks, 1e-4) == RowOrder([4, 4], places)
    mixed = torch.tensor([7, 0, 3, 2, 1, 6, 5, 4])
    joined_rows, joined_labels = (torch.cat(parts)[mixed] for parts in zip(*ranks))
    assert order_of_values((joined_rows, joined_labels), ranks, 1e-4) == RowOrder([4, 4], mixed.tolist())
    assert order_of_values((rows + 0.1, labels), ranks, 1e-4) is None


@pytest.mark.parametrize("places", [[0, 1, 2, 3, 4, 5], [0, 3, 1, 4, 2, 5]])
def test_outputs_stand_where_one_process_has_their_rows(places: list[int]) -> None:
    order, whole = RowOrder([3, 3], places), torch.arange(6.0)
    rows = torch.empty(6)
    rows[:] = whole[places]
    parts = [order.rows_of_rank(rows, rank) for rank in range(2)]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(order.joined_outputs(parts), rows)
    # Two outputs of each row, one after the other; and those of two crops, of which each is a tensor of rows.
    of_row = [torch.stack([part, part + 10], 1).flatten() for part in parts]
    assert torch.equal(order.joined_outputs(of_row), torch.stack([rows, rows + 10], 1).flatten())
    of_crops = [torch.cat([part, part + 10]) for part in parts]
    assert lists_of_rows(([rows, rows + 10],), 6) == 2
    assert torch.equal(order.joined_outputs(of_crops, 2), torch.cat([rows, rows + 10]))


def test_rows_that_each_rank_normalises_by_itself_are_told() -> None:
    rows = torch.rand(12, 3) * torch.tensor([1.0, 5.0, 9.0])
    ranks = [((part - part.mean(0)) / part.std(0),) for part in rows.split(6)]
    whole = ((rows - rows.mean(0)) / rows.std(0),)
    assert is_rescaled_by_rank(whole, ranks)
    assert not is_rescaled_by_rank((torch.cat([part for (part,) in ranks]),), ranks)
    assert not is_rescaled_by_rank((torch.rand(12, 3),), ranks)
    assert not is_rescaled_by_rank(whole, [None, None])


def test_a_copy_has_no_graph_and_is_its_own() -> None:
    given = {"x": torch.ones(2, requires_grad=True) * 2, "names": ["a"]}
    kept = copied(given)
    given["names"].append("b")  # type: ignore[union-attr]
    assert not kept["x"].requires_grad and kept["names"] == ["a"]


def test_batches_of_a_class_that_a_file_or_the_replay_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Local:
        pass

    class Left(Exception):
        pass

    def leave(found: ReplayRecord) -> NoReturn:
        raise Left(found.why_not and found.why_not.id)

    recorder = Recorder(ScriptPlan(str(tmp_path), 0.0, "train.py"), World.from_env({}), lambda _: None)
    saver, plan = ReplaySaver(recorder, tmp_path, World(0, 1)), ReplayPlan(str(tmp_path), 1, str(tmp_path), [], [])
    saver._pack([[Local()]])
    assert not saver.data.passes and saver.data.why_not and saver.data.why_not.id == "batch_not_saved"
    saver.data = ReplayData()
    saver._pack([[Batch(1, 2)]])
    saver._save()
    for name in (START, END):
        write_state(tmp_path, 0, name, {})
    monkeypatch.delattr(sys.modules[__name__], "Batch")
    player = ReplayPlayer(recorder, plan, leave)
    with pytest.raises(Left, match="batches_of_unknown_class"):
        player._opened(player._ranks[0].passes[0][0])


def test_randomness_sees_each_generator() -> None:
    before, seen = randomness(), set()
    assert before == randomness()
    for draw in (lambda: torch.rand(1), random.random, lambda: np.random.rand()):
        draw()
        seen.add(randomness())
    assert len(seen | {before}) == 4


ROWS = torch.arange(24.0).view(4, 6)


@pytest.mark.parametrize(
    ("parts", "same"),
    [
        (ROWS.split(2), True),
        (ROWS.split([1, 3]), True),
        (ROWS.split(3, 1), True),  # of a sequence
        ((ROWS, ROWS), True),  # what all ranks have alike
        (ROWS.split(2)[::-1], False),
        ((ROWS[:2], ROWS[2:] + 1), False),
        ((ROWS[:2], ROWS[2:3]), False),
        ((ROWS, ROWS + 1), False),
    ],
)
def test_whether_inputs_are_those_of_the_ranks_together(parts: tuple[Tensor, ...], same: bool) -> None:
    assert is_joined(ROWS, parts) == same
    assert is_joined(((ROWS,), {"rows": ROWS, "scale": 2}), [((p,), {"rows": p, "scale": 2}) for p in parts]) == same
    assert not is_joined(((ROWS,), {"scale": 2}), [((p,), {"scale": 3}) for p in parts])
    assert not is_joined({"rows": ROWS}, [{"inputs": p} for p in parts])


def test_a_replay_that_does_not_begin_has_a_record(tmp_path: Path) -> None:
    """It ends before the hooks are installed in torch, where the script cannot be played in one process."""
    recorder = Recorder(ScriptPlan(str(tmp_path), 0.0, "train.py"), World.from_env({}), lambda _: None)
    found = recorder.record("itself")
    assert (found.steps, found.saves) == ([], [])


def test_the_line_that_makes_a_module_which_hashes_its_contents(hooks: Hooks) -> None:
    """As torchmetrics' do, which have none before their constructor ends."""

    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counted = [3]

        def __hash__(self) -> int:
            return hash(tuple(self.counted))

    sites = CallSites("", lambda: 0)
    hooks.attach(torch.nn.Module, "__init__", functools.partial(sites._construct, "model"))
    made = Counts()
    made.counted.append(4)
    assert sites.made_at(made)[0][0] == __file__
