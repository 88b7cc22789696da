"""Evaluations and saves of the ranks at other steps, and losses of held-out rows without a loader, on records that are
made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from judge.test_script import ranks_of
from samestep.judge.beside_steps import saves
from samestep.judge.evaluation import evaluation
from samestep.judge.findings import first_apart
from samestep.message import message
from samestep.records.call_site import CallRecord, CallSite
from samestep.records.script import NO_LOADER, EvaluationRecord, GroupRecord, SaveRecord, ScriptRecord


@pytest.mark.parametrize(
    ("steps", "step"), [({}, None), ({0: {2}}, None), ({0: {2, 4}, 1: {2, 4}}, None), ({0: {2, 4}, 1: {2, 6}}, 4)]
)
def test_the_first_step_apart_is_among_ranks_that_do_it_at_all(steps: dict[int, set[int]], step: int | None) -> None:
    assert first_apart(steps) == step


@pytest.mark.parametrize(
    ("rows", "called", "said"),
    [
        ([["a", "b"], ["c", "d"]], ["none"], "evaluation_not_reduced"),
        ([["a", "b"], ["c", "d"]], ["gloo:all_reduce"], "no_evaluation_seen"),
        ([["a", "b"], ["a", "b"]], ["none"], "no_evaluation_seen"),
        # A reference's loss of the rows that are trained.
        ([["0 1 0 0", "0 1 0 1"], ["1 1 0 0", "1 1 0 1"]], ["none"], "no_evaluation_seen"),
    ],
)
def test_losses_of_own_rows_without_a_loader_are_to_be_reduced(
    rows: list[list[str]], called: list[str], said: str, tmp_path: Path
) -> None:
    ranks = [
        replace(
            rank,
            evaluations=[EvaluationRecord(NO_LOADER, 2, collectives=called, rows=of_rank, with_loss=True)],
            groups={"0": GroupRecord([0, 1], [])},
        )
        for rank, of_rank in zip(ranks_of(tmp_path), rows)
    ]
    assert evaluation(ranks).message.id == said


def evaluating(rank: ScriptRecord, steps: list[int], line: int) -> ScriptRecord:
    passes = [*rank.passes, *(replace(rank.passes[0], loader=1, trained=0, length=None) for _ in steps)]
    made = CallRecord("loader", "DataLoader", [CallSite("train.py", line)], number=1)
    evaluations = [EvaluationRecord(number, step) for number, step in enumerate(steps, 1)]
    return replace(rank, passes=passes, evaluations=evaluations, calls=[made])


@pytest.mark.parametrize(
    ("steps", "lines", "said"),
    [
        ([[2, 4], [2, 4]], [7, 7], ""),
        ([[2, 4], [2]], [7, 7], "ranks_evaluate_at_different_steps"),
        ([[2, 4], [2]], [7, 9], ""),  # other loaders
        ([[2, 4], []], [7, 7], ""),  # rank 0's business
    ],
)
def test_ranks_that_evaluate_one_loader_do_so_at_the_same_steps(
    steps: list[list[int]], lines: list[int], said: str, tmp_path: Path
) -> None:
    ranks = [evaluating(*arguments) for arguments in zip(ranks_of(tmp_path), steps, lines)]
    found = evaluation(ranks)
    assert (found.message.id == "ranks_evaluate_at_different_steps") is bool(said)
    if said:
        assert found.message == message(said, ranks=[0], step=4)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([[("best-0-2.pt", 2), ("best-0-4.pt", 4)], [("best-1-2.pt", 2)]], "ranks_save_at_different_steps"),
        ([[("best-0-2.pt", 2)], [("best-1-2.pt", 2)]], "files_of_one_rank_each"),
        ([[("model-2.pt", 2), ("state-0.pt", 4)], [("state-1.pt", 4)]], "files_of_one_rank_each"),
    ],
)
def test_ranks_that_save_files_of_one_kind_do_so_at_the_same_steps(
    files: list[list[tuple[str, int]]], said: str, tmp_path: Path
) -> None:
    ranks = [
        replace(rank, saves=[SaveRecord(f"/w/{name}", step) for name, step in of_rank])
        for rank, of_rank in zip(ranks_of(tmp_path), files)
    ]
    assert saves(ranks).message.id == said
