"""What the results say in words: each verdict, the batch's arithmetic, and the one sentence at the top."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import golden_file
import pytest
from example_results import DIVERGENCE, with_divergence, with_row, with_speed

from said import tells
from samestep.commands.exit_codes import exit_code
from samestep.message import message
from samestep.records.results import CompareResults, EngineResult, Inexactness, OneProcess, Proof, Summary
from samestep.report.language import LANGUAGES, VARIABLE, Language, text
from samestep.report.verdicts import footer, headline, notes, verdict_text


def keep(results: CompareResults, *engines: str) -> CompareResults:
    rows = [row for row in results.engines if row.engine in engines]
    return replace(results, engines=rows, same_as_one_process=None)


WHERE = (
    {"step": 3, "quantity": "loss", "tensor": None, "rank": 1},
    {"step": 0, "quantity": "first gradient", "tensor": "0.weight", "rank": None},
    {"step": None, "quantity": "evaluation", "tensor": "accuracy", "rank": 0},
    {"step": None, "quantity": "names of the weights", "tensor": None, "rank": None},
    {"step": 0, "quantity": "loss", "tensor": None, "rank": 4, "ranks": 5},
)
NATURE = OneProcess("no, as expected", 0.1, "dropout (2) draws another mask on each rank", "nothing needs to change")
YES = OneProcess("yes", 0.0, compared=4, tensors=4, steps=8)
IN_PART = replace(YES, tensors=6)
HIDDEN = OneProcess(
    "not known",
    0.1,
    message("rounding_hides_every_tensor", tensors=["0.weight", "0.bias"]),
    message("find_what_amplifies_rounding"),
    tensors=2,
)
MISTAKE = OneProcess("no", 0.1, "the criterion is a sum over its rows, not a mean", "return the mean")
INEXACT = (
    Inexactness(distance=7.7e-5, bound=2e-4, loss_gap=0.00123, skipped_steps=0),
    Inexactness(distance=7.7e-5, bound=None, loss_gap=None, skipped_steps=1),
    Inexactness(0.0, None, 0.0, skipped_steps=3),
)


TOO_FAST = Summary(median=3.79, low=3.6, high=3.9, n=5)


def headlines(results: CompareResults, proof: CompareResults) -> Iterator[str]:
    """The headline of each group of engines, with the answer about one process, and without."""
    nobody_asked = replace(results, same_as_one_process=None)
    yield headline(results)
    yield headline(nobody_asked)
    yield headline(keep(results, "single", "ddp", "dataparallel"))
    yield headline(with_speed(nobody_asked, 0, median=9000.0, low=8900.0, high=9100.0))  # one process is the fastest
    yield headline(with_row(nobody_asked, 3, settings={"reshard": False, "prefetch": 2}))
    for engine in ("ddp", "fsdp", "amp", "single", "lightning", "none"):
        yield headline(keep(proof, engine))
    for answer in (YES, NATURE, MISTAKE, HIDDEN):
        yield headline(replace(keep(proof, "ddp"), same_as_one_process=answer))
    yield headline(replace(keep(proof, "ddp", "lightning"), same_as_one_process=YES))


def other_notes(results: CompareResults) -> Iterator[str]:
    """The notes of other results than the example's: those that the example does not have."""
    known = set(notes(results))
    for other in (
        with_divergence(results, expected=[1, 3], found=(3, 1)),
        *(replace(results, global_batch=64, world_size=ranks) for ranks in (3, 1)),
        replace(results, same_as_one_process=YES),
        replace(keep(results, "ddp"), same_as_one_process=IN_PART),
        replace(results, same_as_one_process=HIDDEN),
        replace(results, same_as_one_process=MISTAKE),
        replace(results, proof=Proof(8, "float32", rows=32, float64_failed="RuntimeError: expected Float")),
        replace(results, proof=Proof(8, "float64", rows_looked_at=111)),
        *(with_row(results, 4, numerics=inexactness) for inexactness in INEXACT),
        with_row(results, 3, settings={"reshard": False, "prefetch": 2}),
        with_row(results, 3, ratio=TOO_FAST),
    ):
        yield from (note for note in notes(other) if note not in known)


@pytest.mark.parametrize("into", LANGUAGES)
def test_the_golden_file_holds_what_is_said(
    results: CompareResults, proof: CompareResults, into: Language, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, into)
    differing = [EngineResult("differs", first_divergence=replace(DIVERGENCE, **changes)) for changes in WHERE]
    golden_file.agrees(
        f"verdicts.{into}",
        golden_file.parts(
            {
                "verdicts": [verdict_text(row) for row in [*results.engines, *differing]],
                "headlines": [*headlines(results, proof)],
                "notes": notes(results),
                "notes of a proof": notes(proof),
                "notes of other results": [*other_notes(results)],
            }
        ),
    )


@pytest.mark.parametrize("rows", [[3, 1], (3, 1)])
def test_a_divergence_lists_its_values(results: CompareResults, rows: Any) -> None:
    results = with_divergence(results, expected=[1, 3], found=rows)
    assert notes(results) == notes(with_divergence(results, expected="1, 3", found="3, 1"))


def test_an_interval_that_stays_clear_is_no_tie(results: CompareResults) -> None:
    assert "no clear difference" not in headline(with_speed(results, 2, high=5000.0))


@pytest.mark.parametrize(("low", "is_said"), [(2.01, True), (2.004, False), (1.9, False)])
def test_a_ratio_beyond_the_ranks_is_called_so(low: float, is_said: bool, results: CompareResults) -> None:
    """The whole interval has to be beyond them; the headline has no ratio then."""
    found = with_row(keep(results, "single", "ddp"), 1, ratio=replace(TOO_FAST, low=low))
    assert found.engines[1].ranks == 2
    for said in (notes(found), footer(found)):
        assert (
            any(tells(sentence, "faster_than_ranks_allow", engine="ddp (torchrun)", ranks=2) for sentence in said)
            == is_said
        )
    assert tells(headline(found), "fastest_here", ratio="3.79") != is_said


def test_a_faster_engine_that_differs_does_not_win(results: CompareResults) -> None:
    assert "7,111" not in headline(results)
    assert "fastest" not in headline(keep(results, "lightning", "horovod"))


def test_every_reason_divergence_and_remark_is_among_the_notes(results: CompareResults) -> None:
    said = "\n".join(notes(results))
    for row in results.engines:
        assert all(str(message) in said for message in (row.reason, *row.notes) if message)
    assert all(note.endswith(".") and not note.endswith("..") for note in notes(results))


def test_one_process_is_answered_both_ways_and_not_when_nobody_asked(results: CompareResults) -> None:
    proven = replace(keep(results, "ddp", "fsdp"), same_as_one_process=YES)
    said = message("ranks_compute_what_one_process_does", ranks=2, steps=8, compared=None, tensors=None)
    assert notes(proven)[-1] == text(said, "en")
    assert tells(headline(proven), "job_trains_as_in_one_process", ranks=2)
    results = replace(results, same_as_one_process=None)
    assert not any("whole batch" in note for note in notes(results))


@pytest.mark.parametrize("verdict", ["differs", "failed", "refused"])
def test_no_yes_stands_beside_an_engine_that_is_not_proven(verdict: Any, results: CompareResults) -> None:
    """It is of the reference, which plays no engine: nobody may read it as a word on that one. One that refuses the job
    trains nothing, and stands in nobody's way."""
    engines = [EngineResult("same", engine="ddp", replicas=2), EngineResult(verdict, engine="fsdp", replicas=2)]
    beside = replace(results, engines=engines, same_as_one_process=YES)
    of_reference, of_all = "reference_computes_what_one_process_does", "ranks_compute_what_one_process_does"
    assert tells(notes(beside)[-1], of_all if verdict == "refused" else of_reference, engines="fsdp", ranks=2, steps=8)
    assert "one process" not in headline(replace(beside, engines=engines[1:]))
    alone = replace(beside, engines=engines[1:])
    assert tells(notes(alone)[-1], of_reference, engines="fsdp", ranks=2, steps=8)
    absent = replace(beside, engines=[engines[0], EngineResult("unavailable", engine="fsdp")])
    assert tells(notes(absent)[-1], of_all, ranks=2, steps=8)


@pytest.mark.parametrize(
    ("answer", "code", "strict"), [(YES, 0, 0), (NATURE, 0, 1), (MISTAKE, 1, 1), (HIDDEN, 1, 1), (None, 0, 0)]
)
def test_exit_codes(results: CompareResults, answer: OneProcess | None, code: int, strict: int) -> None:
    good = replace(results, engines=[EngineResult("same", engine="ddp")], same_as_one_process=answer)
    assert (exit_code(good), exit_code(good, strict=True)) == (code, strict)
    for bad in ("differs", "failed", "refused"):
        assert exit_code(replace(good, engines=[EngineResult(bad, engine="ddp")])) == 1
