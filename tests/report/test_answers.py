"""The two answers: what the engines do, and whether the job trains on several ranks as in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from samestep.commands.exit_codes import exit_code
from samestep.records.results import CompareResults, EngineResult, OneProcess
from samestep.report.headline import headline
from samestep.report.sentences import one_process

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
    assert "takes the same step as one process playing" in headline(results) or "take the same step" in headline(
        results
    )
    said = {answer.answer: headline(replace(results, same_as_one_process=answer)) for answer in (NATURE, MISTAKE)}
    assert f"as in one process, as expected: {NATURE.reason}" in said["no, as expected"]
    assert f"as in one process, a mistake: {MISTAKE.reason}" in said["no"]
    yes = headline(replace(results, same_as_one_process=OneProcess("yes", 0.0)))
    assert f"this job trains on {results.world_size} ranks as in one process" in yes
    assert "in one process" not in headline(replace(results, same_as_one_process=None))


def test_the_notes_say_what_helps(results: CompareResults) -> None:
    assert one_process(replace(results, same_as_one_process=MISTAKE))[-1] == "What helps: return the mean."
    assert "as expected" in one_process(replace(results, same_as_one_process=NATURE))[0]
