"""What goes on beside the steps: evaluation, random numbers, the order of collectives. See also test_check.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planting import Edit
from recorder.beside_faults import BESIDE_FAULTS
from recorder.faults import Fault
from recorder.plant import checked, row_of, text_of
from samestep.judge.beside_steps import collectives, randoms, saves
from samestep.judge.evaluation import evaluation
from samestep.message import Message, message
from samestep.records.script import (
    EvaluationRecord,
    FetchDraws,
    GroupRecord,
    PassRecord,
    RandomRecord,
    SaveRecord,
    ScriptRecord,
    StepRecord,
)

STEP = StepRecord(0, [], [0.1], [], [], 0, None, {}, [])


def rank(number: int, **fields: object) -> ScriptRecord:
    return replace(ScriptRecord(number, 2, {}, [STEP], [], "steps", [], 0.0, [0.1]), **fields)


def evaluated(number: int, rows: list[int], called: list[str], sampler: str = "DistributedSampler") -> ScriptRecord:
    seen = PassRecord(0, 7, 4, [rows], [], [], 0, sampler)
    return rank(number, passes=[seen], evaluations=[EvaluationRecord(0, 1, {}, called)])


@pytest.mark.parametrize(
    ("shares", "called", "answer", "said"),
    [
        (([0, 2, 4, 6], [1, 3, 5, 0]), "all_reduce", "differs", "evaluated_rows_counted_twice"),
        (([0, 2, 4, 6], [1, 3, 5, 0]), "all_gather", "right", "ranks_evaluate_together"),
        (([0, 2, 4], [1, 3, 5]), "all_reduce", "warning", "evaluation_rows_left_out"),
        (([*range(7)], [*range(7)]), "all_reduce", "right", "each_rank_evaluates"),
        (([0], [0]), "all_reduce", "differs", "rows_evaluated_by_no_rank"),
    ],
)
def test_each_row_is_evaluated_once(shares: tuple[list[int], list[int]], called: str, answer: str, said: str) -> None:
    found = evaluation([evaluated(number, rows, [called]) for number, rows in enumerate(shares)])
    assert (found.answer, found.message.id, found.message.fields["rows"]) == (answer, said, 7)


def with_content(number: int, rows: list[str], called: str, indices: list[int] | None = None) -> ScriptRecord:
    """Returns the record of a rank that evaluates these rows; of its own list of them, where it has no indices."""
    read = [*range(len(rows))] if indices is None else indices
    own = f"rank {number}" if indices is None else ""
    seen = PassRecord(0, 16, 4, [read], [], [[row] for row in rows], 0, "DistributedSampler", own)
    group = GroupRecord([0, 1], ["all_reduce [1] float"])
    return rank(number, passes=[seen], evaluations=[EvaluationRecord(0, 1, {}, [called])], groups={"0": group})


LETTERS = "abcdefghijklmnop"


@pytest.mark.parametrize(
    ("shares", "called", "answer", "said"),
    [
        # Each rank cuts its part out of a list in an order of its own.
        (("abcdefgh", "ijklmabc"), "all_reduce", "differs", "evaluation_order_of_each_rank"),
        (("abcdefgh", "ijklmnop"), "all_reduce", "warning", "evaluation_rows_left_out"),  # of 16 each
        ((LETTERS, LETTERS[::-1]), "all_reduce", "warning", "evaluation_rows_counted_on_every_rank"),
        ((LETTERS, LETTERS), "all_gather", "right", "each_rank_evaluates"),
        ((LETTERS, LETTERS.upper()), "all_reduce", "right", "each_rank_evaluates_its_own_dataset"),
        ((LETTERS, LETTERS.upper()), "none", "warning", "evaluation_not_reduced"),
        ((LETTERS, LETTERS), "none", "right", "each_rank_evaluates"),
    ],
)
def test_evaluated_rows_are_told_by_their_content(shares: tuple[str, str], called: str, answer: str, said: str) -> None:
    found = evaluation([with_content(number, [*rows], called) for number, rows in enumerate(shares)])
    assert (found.answer, found.message.id) == (answer, said)


@pytest.mark.parametrize(
    ("called", "said"), [("all_reduce", "ranks_evaluate_together"), ("none", "evaluation_not_reduced")]
)
def test_an_evaluation_that_is_shared_out_is_brought_together(called: str, said: str) -> None:
    halves = [with_content(n, [*LETTERS[n::2]], called, [*range(n, 16, 2)]) for n in range(2)]
    assert evaluation(halves).message.id == said


def test_rank_0_alone_evaluates() -> None:
    """All rows by a plain loader; half of them by a DistributedSampler that was left in place."""
    whole = evaluation([evaluated(0, [*range(7)], ["none"], "SequentialSampler"), rank(1)])
    assert (whole.answer, whole.message) == ("right", message("one_rank_evaluates", evaluated=7, rows=7))
    half = evaluation([replace(evaluated(0, [0], ["none"])), rank(1)])
    assert half.answer == "differs"


def test_other_statistics_at_the_evaluation_are_a_warning() -> None:
    of = [replace(evaluated(n, [*range(7)], []), evaluations=[EvaluationRecord(0, 1, {"bn": n})]) for n in (0, 1)]
    found = evaluation(of)
    assert (found.question, found.answer) == ("buffers", "warning") and found.message.fields["buffer"] == "bn"


@pytest.mark.parametrize(
    ("states", "answer"),
    [(("a", "b"), "right"), (("a", "a"), "warning"), (("", ""), "right"), (("a", ""), "right")],
)
def test_equal_states_where_numbers_are_drawn_are_a_warning(states: tuple[str, str], answer: str) -> None:
    ranks = [rank(n, randoms=RandomRecord({}, [state], [])) for n, state in enumerate(states)]
    assert randoms(ranks).answer == answer
    beside = [rank(n, randoms=RandomRecord({}, [], [], [state])) for n, state in enumerate(states)]
    assert randoms(beside).answer == answer


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (("a", "b", "c", "d"), "model_draws_no_random_numbers"),
        (("a", "a", "c", "d"), "workers_repeat_noise"),
        (("a", "b", "c", "a"), "datasets_of_ranks_repeat_noise"),
    ],
)
def test_datasets_that_draw_alike_are_a_warning(states: tuple[str, ...], said: str) -> None:
    fetched = [[FetchDraws(worker, [states[2 * n + worker]]) for worker in (0, 1)] for n in (0, 1)]
    ranks = [rank(n, randoms=RandomRecord(fetched=of_rank)) for n, of_rank in enumerate(fetched)]
    assert randoms(ranks).message.id == said


@pytest.mark.parametrize(
    ("second", "answer"),
    [
        (["all_reduce [4] float", "barrier", "all_gather [3] float"], "right"),  # a gather's parts may be uneven
        (["all_reduce [4] float"], "right"),  # ended earlier
        (["all_reduce [2, 2] float", "barrier"], "differs"),
        (["all_reduce [4] double", "barrier"], "differs"),
        (["barrier", "all_reduce [4] float"], "differs"),
    ],
)
def test_ranks_call_the_same_collectives(second: list[str], answer: str) -> None:
    calls = ["all_reduce [4] float", "barrier", "all_gather [2] float"]
    groups = [GroupRecord([0, 1], each) for each in (calls, second)]
    found = collectives([rank(n, groups={"0": group}) for n, group in enumerate(groups)])
    assert found.answer == answer
    if found.divergence:
        assert found.divergence.rank == 1 and found.divergence.expected.fields["number"] == 1


def test_a_number_is_reduced_alike_alone_and_in_a_list() -> None:
    """As DeepSpeed's pipelines reduce the loss."""
    groups = [GroupRecord([0, 1], [call]) for call in ("all_reduce [] float", "all_reduce [1] float")]
    assert collectives([rank(n, groups={"0": group}) for n, group in enumerate(groups)]).answer == "right"


def test_collectives_that_the_recorder_has_forgotten_are_not_compared() -> None:
    one, other = (
        GroupRecord([0, 1], ["barrier", "all_reduce [4] float"], 5),
        GroupRecord([0, 1], ["all_reduce [4] float"], 6),
    )
    assert collectives([rank(0, groups={"0": one}), rank(1, groups={"0": other})]).answer == "right"


SHARED = message("ranks_write_one_file", ranks=[0, 1], file="last.pt", step=4)


@pytest.mark.parametrize(
    ("files", "answer", "said"),
    [
        ((["/a/last.pt"], []), "right", message("files_of_one_rank_each", files=1)),
        ((["/a/rank0.pt"], ["/a/rank1.pt"]), "right", message("files_of_one_rank_each", files=2)),
        ((["/a/0.pt", "/a/last.pt"], ["/a/last.pt"]), "warning", SHARED),
        (([], []), "right", message("no_file_saved")),
    ],
)
def test_a_file_of_several_ranks_is_a_warning(files: tuple[list[str], list[str]], answer: str, said: Message) -> None:
    found = saves([rank(n, saves=[SaveRecord(file, 4) for file in each]) for n, each in enumerate(files)])
    assert (found.answer, found.message) == (answer, said)


@pytest.mark.parametrize("fault", [pytest.param(each, id=each.name, marks=pytest.mark.check) for each in BESIDE_FAULTS])
def test_a_planted_fault_is_caught_and_named(fault: Fault, tmp_path: Path) -> None:
    results = checked(text_of(fault.script, fault), tmp_path, "--no-replay")
    row = row_of(fault.script, results, fault)
    assert row.caught and row.named, (row, results.findings)


def test_one_seed_on_all_ranks_and_one_file_of_all_are_warnings(tmp_path: Path) -> None:
    unseeded = Edit("    torch.manual_seed(rank)\n", "")
    saved = Edit("model.train()\n", "torch.save(model.state_dict(), 'last.pt')\n        model.train()\n")
    results = checked(text_of("evaluates", unseeded, saved), tmp_path, "--no-replay")
    found = {each.question: each for each in results.findings}
    assert results.answer == "right" and found["random numbers"].answer == "warning"
    assert found["saves"].answer == "warning" and found["saves"].message.fields["file"] == "last.pt"
    assert found["evaluation"].answer == found["collectives"].answer == "right"
