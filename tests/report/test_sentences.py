"""What the results say in words: each verdict, the batch's arithmetic, and the one sentence at the top."""

from __future__ import annotations

from typing import Any

import pytest

from samestep.report.headline import answer
from samestep.report.sentences import notes, verdict_text

Results = dict[str, Any]


def keep(results: Results, *engines: str) -> Results:
    results["engines"] = [row for row in results["engines"] if row["engine"] in engines]
    return results


@pytest.mark.parametrize(
    ("at", "said"),
    [
        ({"step": 3, "quantity": "loss", "tensor": None, "rank": 1}, "differs at step 3: loss of rank 1"),
        (
            {"step": 0, "quantity": "first gradient", "tensor": "0.weight", "rank": None},
            "differs at step 0: first gradient of 0.weight",
        ),
        (
            {"step": None, "quantity": "evaluation", "tensor": "accuracy", "rank": 0},
            "differs: evaluation of accuracy on rank 0",
        ),
        (
            {"step": None, "quantity": "names of the weights", "tensor": None, "rank": None},
            "differs: names of the weights",
        ),
    ],
)
def test_a_divergence_says_where(at: dict[str, Any], said: str) -> None:
    assert verdict_text({"verdict": "differs", "first_divergence": at}) == said


def test_each_verdict_has_its_words(results: Results) -> None:
    assert [verdict_text(row) for row in results["engines"]] == [
        "same step (bitwise)",
        "same step (bitwise)",
        "same step (bitwise)",
        "same step",
        "approximate",
        "differs at step 3: loss of rank 1",
        "failed",
        "refused",
        "unavailable",
    ]


@pytest.mark.parametrize(
    ("rows", "ranks", "said"),
    [
        (64, 2, "2 ranks x 32 = 64 samples,"),
        (64, 3, "1 rank x 22 + 2 ranks x 21 = 64 samples (uneven),"),
        (64, 1, "1 rank x 64 = 64 samples,"),
    ],
)
def test_the_batch_arithmetic_adds_up(results: Results, rows: int, ranks: int, said: str) -> None:
    results |= {"global_batch": rows, "world_size": ranks}
    assert any(said in note for note in notes(results))


def test_the_answer_names_proof_and_speed(results: Results) -> None:
    assert answer(keep(results, "single", "ddp", "dataparallel")) == (
        "ddp takes the same step as one process playing 2 ranks, bit for bit; "
        "fastest here: ddp (torchrun), 5,203 samples/s (1.56 × one process), not told apart from ddp (spawn)."
    )


def test_the_answer_names_what_is_wrong(results: Results) -> None:
    assert answer(results) == (
        "ddp and fsdp take the same step as one process playing 2 ranks, ddp bit for bit; amp approximates it; "
        "lightning differs at step 3: loss of rank 1; horovod failed; "
        "fastest here: ddp (torchrun), 5,203 samples/s (1.56 × one process), not told apart from ddp (spawn); "
        "amp, approximate, reaches 5,872."
    )


def test_one_process_may_be_the_fastest(results: Results) -> None:
    results["engines"][0]["samples_per_second"] |= {"median": 9000.0, "low": 8900.0, "high": 9100.0}
    assert "fastest here: single (one process), 9,000 samples/s." in answer(results)


def test_an_interval_that_stays_clear_is_no_tie(results: Results) -> None:
    results["engines"][2]["samples_per_second"]["high"] = 5000.0
    assert "told apart" not in answer(results)


def test_a_faster_engine_that_differs_does_not_win(results: Results) -> None:
    assert "7,111" not in answer(results)
    assert "fastest" not in answer(keep(results, "lightning", "horovod"))


def test_the_answer_of_a_proof_speaks_of_no_speed(proof: Results) -> None:
    assert answer(keep(proof, "ddp")) == "ddp takes the same step as one process playing 2 ranks, bit for bit."
    assert answer(keep(proof, "none")) == "no engine could be proven here."


def test_other_groups_of_engines(proof: Results) -> None:
    engines = {row["engine"]: row for row in proof["engines"]}
    proof["engines"] = [engines["fsdp"]]
    assert answer(proof) == "fsdp takes the same step as one process playing 2 ranks, up to rounding."
    proof["engines"] = [engines["amp"]]
    assert answer(proof) == "amp approximates the step of one process playing 2 ranks."
    proof["engines"] = [engines["single"]]
    assert answer(proof) == "single takes the same step as one process, bit for bit."


def test_every_reason_divergence_and_remark_is_among_the_notes(results: Results) -> None:
    text = "\n".join(notes(results))
    for row in results["engines"]:
        for said in [row["reason"], *row["notes"]]:
            assert said is None or said in text
    assert "expected 2.302585092994046, found 2.302585092994057" in text
    assert "averaged per rank instead of per row" in text
    assert "2 ranks do not compute what one process computes" in text and "dropout (7)" in text
    assert "n counts launches" in text and "95 % bootstrap interval" in text
    assert all(note.endswith(".") and not note.endswith("..") for note in notes(results))


def test_the_notes_of_a_proof_speak_of_no_measurement(proof: Results) -> None:
    text = "\n".join(notes(proof))
    assert "launches" not in text and "float64 over 8 steps" in text


def test_one_process_is_answered_both_ways_and_not_when_nobody_asked(results: Results) -> None:
    results["same_as_one_process"] = {"same": True, "reason": None}
    assert notes(results)[-1] == "2 ranks compute what one process computes on the whole batch."
    results["same_as_one_process"] = None
    assert not any("whole batch" in note for note in notes(results))


def test_a_proof_in_float32_says_why(results: Results) -> None:
    results["proof"] |= {"dtype": "float32", "float64_failed": "RuntimeError: expected Float"}
    assert any("Proven in float32" in note and "RuntimeError: expected Float" in note for note in notes(results))
