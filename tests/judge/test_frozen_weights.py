"""Frozen networks, moving averages, buffers and queues of the ranks, on records that are made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from judge.test_script import ranks_of
from samestep.judge.frozen_weights import buffers, frozen_weights, with_effects
from samestep.message import message
from samestep.records.findings import Finding
from samestep.records.script import ScriptRecord, UntrainedRecord

NAME = "encoder_k.weight"


def holding(rank: ScriptRecord, digests: list[int], start: int = 1, **fields: Any) -> ScriptRecord:
    """Returns a rank's record with a weight or buffer that has these digests after its steps."""
    steps = list[Any]()
    for step, before, digest in zip(rank.steps, [start, *digests], digests):
        changed = {NAME: digest} if digest != before else {}
        steps.append(replace(step, changed=changed, updates={"encoder_k": len(changed)}, micro_batches=[]))
    record = UntrainedRecord("frozen", "encoder_k", start)
    return replace(rank, steps=steps, untrained={NAME: replace(record, **fields)})


def together(folder: Path, *digests: list[int], **fields: Any) -> list[ScriptRecord]:
    return [holding(rank, of_rank, **fields) for rank, of_rank in zip(ranks_of(folder), digests)]


def test_weights_that_follow_alike_are_right(tmp_path: Path) -> None:
    finding = frozen_weights(together(tmp_path, [1, 2, 3, 4], [1, 2, 3, 4]))
    said = message("frozen_weights_are_the_same", names=1, steps=4, still=None)
    assert (finding.answer, finding.message) == ("right", said)


@pytest.mark.parametrize(
    ("second", "called", "answer", "said"),
    [
        ([1, 1, 1, 1], True, "differs", "frozen_weights_change_on_some_ranks"),
        ([1, 5, 6, 7], True, "differs", "frozen_weights_change_apart"),
        ([1, 1, 1, 1], False, "warning", "copy_is_not_the_same_on_all_ranks"),
    ],
)
def test_weights_that_one_rank_changes_are_named(
    second: list[int], called: bool, answer: str, said: str, tmp_path: Path
) -> None:
    finding = frozen_weights(together(tmp_path, [1, 2, 3, 4], second, called=called))
    assert (finding.answer, finding.message.id) == (answer, said)
    if finding.divergence:
        assert (finding.divergence.step, finding.divergence.rank, finding.divergence.tensor) == (1, 1, NAME)


def test_an_average_that_stays_what_it_was_copied_from_is_warned_of(tmp_path: Path) -> None:
    ranks = together(tmp_path, [1] * 4, [1] * 4)
    copied = [replace(rank, start={**rank.start, next(iter(rank.steps[0].weights)): 1}) for rank in ranks]
    assert frozen_weights(copied).message == message("average_never_updated", network="encoder_k", steps=4)
    reference = [replace(rank, untrained={"ref": replace(rank.untrained[NAME], network="ref")}) for rank in copied]
    assert frozen_weights(reference).answer == "right"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"updates": {"encoder_k": 2}, "micro_batches": [None, None]}, "average_updated_at_each_micro_batch"),
        ({"updates": {"encoder_k": 1}, "micro_batches": [None, None]}, "frozen_weights_are_the_same"),
        ({"updates": {"encoder_k": 1}, "early": ["encoder_k"]}, "average_updated_before_step"),
    ],
)
def test_how_often_and_when_an_average_follows(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    ranks = together(tmp_path, [1, 2, 3, 4], [1, 2, 3, 4])
    ranks = [replace(rank, steps=[replace(step, **changed) for step in rank.steps]) for rank in ranks]
    assert frozen_weights(ranks).message.id == said


@pytest.mark.parametrize(("fields", "said"), [({"in_part": True}, "queue_not_gathered"), ({}, "buffer_of_own_rows")])
def test_a_buffer_of_each_rank_matters_where_the_gradient_of_one_process_is_another(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    ranks = together(tmp_path, [1, 2, 3, 4], [1, 5, 6, 7], kind="buffer", **fields)
    (warning,) = buffers(ranks)
    assert (warning.answer, warning.message) == ("warning", message(said, buffer=NAME, step=1))

    def after(answer: Any) -> Finding:
        return with_effects([warning], [Finding("replayed gradient", answer, message("one_rank"))])[0]

    assert [after(answer).answer for answer in ("right", "unknown", "differs")] == ["right", "warning", "differs"]
    assert buffers(together(tmp_path, [1, 2, 3, 4], [1, 2, 3, 4], kind="buffer")) == []


@pytest.mark.parametrize(("follows", "said"), [(1e-7, "average_never_updated"), (1e-3, "frozen_weights_are_the_same")])
def test_an_average_that_is_written_and_stays_is_warned_of(follows: float, said: str, tmp_path: Path) -> None:
    """As one that is averaged with itself, or by a decay of one: rounding is no movement."""
    ranks = []
    for rank in together(tmp_path, [2, 3, 4, 5], [2, 3, 4, 5]):
        start = {**rank.start, next(iter(rank.steps[0].weights)): 1}
        held = {"net.weight": replace(rank.untrained[NAME], network="net")}
        steps = [replace(step, updates={"net": 1}, changed={}) for step in rank.steps]
        ranks.append(replace(rank, start=start, untrained=held, steps=steps, follows={"net": follows}))
    assert frozen_weights(ranks).message.id == said
