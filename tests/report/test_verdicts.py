"""What the results say in words: each verdict, the batch's arithmetic, and the one sentence at the top."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from example_results import DIVERGENCE, with_divergence, with_row, with_speed

from samestep.commands.exit_codes import exit_code
from samestep.message import message
from samestep.records.results import CompareResults, EngineResult, Inexactness, OneProcess, Proof
from samestep.report.language import text
from samestep.report.verdicts import headline, notes, one_process, verdict_text


def keep(results: CompareResults, *engines: str) -> CompareResults:
    rows = [row for row in results.engines if row.engine in engines]
    return replace(results, engines=rows, same_as_one_process=None)


@pytest.mark.parametrize(
    ("changes", "said"),
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
def test_a_divergence_says_where(changes: dict[str, Any], said: str) -> None:
    assert verdict_text(EngineResult("differs", first_divergence=replace(DIVERGENCE, **changes))) == said


@pytest.mark.parametrize("rows", [[3, 1], (3, 1)])
def test_a_divergence_lists_its_values(results: CompareResults, rows: Any) -> None:
    results = with_divergence(results, expected=[1, 3], found=rows)
    assert any(re.search(r"1, 3,.* 3, 1\.$", note) for note in notes(results))


def test_each_verdict_has_its_words(results: CompareResults) -> None:
    assert [verdict_text(row) for row in results.engines] == [
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
def test_the_batch_arithmetic_adds_up(results: CompareResults, rows: int, ranks: int, said: str) -> None:
    results = replace(results, global_batch=rows, world_size=ranks)
    assert any(said in note for note in notes(results))


def test_the_headline_names_proof_and_speed(results: CompareResults) -> None:
    assert headline(keep(results, "single", "ddp", "dataparallel")) == (
        "ddp takes the same step as one process playing 2 ranks, bit for bit; "
        "fastest here: ddp (torchrun), 5,203 samples/s (1.56 × one process), with no clear difference from ddp (spawn)."
    )


def test_the_headline_names_what_is_wrong(results: CompareResults) -> None:
    assert headline(replace(results, same_as_one_process=None)) == (
        "ddp and fsdp take the same step as one process playing 2 ranks, ddp bit for bit; amp approximates it; "
        "lightning differs at step 3: loss of rank 1; horovod failed; "
        "fastest here: ddp (torchrun), 5,203 samples/s (1.56 × one process), with no clear difference from ddp (spawn)"
        "; amp, approximate, reaches 5,872."
    )


def test_one_process_may_be_the_fastest(results: CompareResults) -> None:
    results = with_speed(results, 0, median=9000.0, low=8900.0, high=9100.0)
    assert "fastest here: single (one process), 9,000 samples/s." in headline(results)


def test_an_interval_that_stays_clear_is_no_tie(results: CompareResults) -> None:
    assert "no clear difference" not in headline(with_speed(results, 2, high=5000.0))


def test_a_faster_engine_that_differs_does_not_win(results: CompareResults) -> None:
    assert "7,111" not in headline(results)
    assert "fastest" not in headline(keep(results, "lightning", "horovod"))


def test_the_headline_of_a_proof_speaks_of_no_speed(proof: CompareResults) -> None:
    assert headline(keep(proof, "ddp")) == "ddp takes the same step as one process playing 2 ranks, bit for bit."
    assert headline(keep(proof, "none")) == "no engine could be proven here."


def test_other_groups_of_engines(proof: CompareResults) -> None:
    assert headline(keep(proof, "fsdp")) == "fsdp takes the same step as one process playing 2 ranks, up to rounding."
    assert headline(keep(proof, "amp")) == "amp approximates the step of one process playing 2 ranks."
    assert headline(keep(proof, "single")) == "single takes the same step as one process, bit for bit."


def test_every_reason_divergence_and_remark_is_among_the_notes(results: CompareResults) -> None:
    text = "\n".join(notes(results))
    for row in results.engines:
        for said in [str(said) for said in (row.reason, *row.notes) if said]:
            assert said is None or said in text
    assert "expected 2.302585092994046, found 2.302585092994057" in text
    assert "averaged per rank instead of per row" in text
    assert "2 ranks do not compute what one process computes" in text and "dropout (7)" in text
    assert "n counts launches" in text and "95 % bootstrap interval" in text
    assert all(note.endswith(".") and not note.endswith("..") for note in notes(results))


def test_the_notes_of_a_proof_speak_of_no_measurement(proof: CompareResults) -> None:
    text = "\n".join(notes(proof))
    assert "launches" not in text and "float64 over 8 steps" in text


def test_one_process_is_answered_both_ways_and_not_when_nobody_asked(results: CompareResults) -> None:
    results = replace(results, same_as_one_process=OneProcess("yes", max_difference=0.0))
    assert notes(results)[-1] == text(message("ranks_compute_what_one_process_does", ranks=2), "en")
    results = replace(results, same_as_one_process=None)
    assert not any("whole batch" in note for note in notes(results))


def test_a_proof_in_float32_says_why(results: CompareResults) -> None:
    results = replace(results, proof=Proof(8, "float32", float64_failed="RuntimeError: expected Float"))
    assert any("Proven in float32" in note and "RuntimeError: expected Float" in note for note in notes(results))


@pytest.mark.parametrize(
    ("inexactness", "said"),
    [
        (
            Inexactness(distance=7.7e-5, bound=2e-4, loss_gap=0.00123, skipped_steps=0),
            "its final weights are 7.7e-05 from those of exact training (its rounding allows 2.0e-04), and its last "
            "loss is 0.12% off.",
        ),
        (
            Inexactness(distance=7.7e-5, bound=None, loss_gap=None, skipped_steps=1),
            "7.7e-05 from those of exact training, and its last loss is – off; 1 step was skipped after an overflow.",
        ),
        (Inexactness(0.0, None, 0.0, skipped_steps=3), "off; 3 steps were skipped after an overflow."),
    ],
)
def test_an_inexact_engine_says_how_far_off_it_is(results: CompareResults, inexactness: Inexactness, said: str) -> None:
    assert not any("inexact part" in note for note in notes(results))
    (note,) = [note for note in notes(with_row(results, 4, numerics=inexactness)) if "inexact part" in note]
    assert note.startswith("amp (torchrun): with its inexact part off it takes the same steps") and note.endswith(said)


def test_an_engine_is_named_with_its_changed_settings(results: CompareResults) -> None:
    results = with_row(results, 3, settings={"reshard": False, "prefetch": 2})
    assert "fsdp reshard=False prefetch=2 take" in headline(results)
    assert any(note.startswith("fsdp reshard=False prefetch=2 (torchrun): clipping") for note in notes(results))


NATURE = OneProcess("no, as expected", 0.1, "dropout (2) draws another mask on each rank", "nothing needs to change")
MISTAKE = OneProcess("no", 0.1, "the criterion is a sum over its rows, not a mean", "return the mean")


@pytest.mark.parametrize(
    ("answer", "code", "strict"), [(OneProcess("yes", 0.0), 0, 0), (NATURE, 0, 1), (MISTAKE, 1, 1), (None, 0, 0)]
)
def test_exit_codes(results: CompareResults, answer: OneProcess | None, code: int, strict: int) -> None:
    good = replace(results, engines=[EngineResult("same", engine="ddp")], same_as_one_process=answer)
    assert (exit_code(good), exit_code(good, strict=True)) == (code, strict)
    for bad in ("differs", "failed", "refused"):
        assert exit_code(replace(good, engines=[EngineResult(bad, engine="ddp")])) == 1


def test_the_headline_gives_both_answers(results: CompareResults) -> None:
    assert "the same step" in headline(results)
    said = {answer.answer: headline(replace(results, same_as_one_process=answer)) for answer in (NATURE, MISTAKE)}
    assert (
        text(message("job_differs_from_one_process_as_expected", ranks=results.world_size, why=NATURE.reason), "en")
        in said["no, as expected"]
    )
    assert (
        text(message("job_differs_from_one_process_by_mistake", ranks=results.world_size, why=MISTAKE.reason), "en")
        in said["no"]
    )
    yes = headline(replace(results, same_as_one_process=OneProcess("yes", 0.0)))
    assert text(message("job_trains_as_in_one_process", ranks=results.world_size), "en") in yes
    assert "in one process" not in headline(replace(results, same_as_one_process=None))


def test_the_notes_say_what_helps(results: CompareResults) -> None:
    assert one_process(replace(results, same_as_one_process=MISTAKE))[-1] == text(
        message("what_helps", advice="return the mean."), "en"
    )
    assert "as expected" in one_process(replace(results, same_as_one_process=NATURE))[0]
