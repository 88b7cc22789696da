"""What counts as right for a twin of `samestep check`: each rule on results as the command writes them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from corpus import FAULTS, HEALTHY
from corpus.judge import judged, table_of
from corpus.twin import Fault, line_of

FAULT = next(fault for fault in FAULTS if (fault.script, fault.kind) == ("ddp_classifier", "gradients_not_reduced"))


def output(answer: str, *findings: dict[str, Any]) -> str:
    return json.dumps({"answer": answer, "findings": [{"sentence": "", **finding} for finding in findings]})


@pytest.mark.parametrize(
    ("answer", "exit_code", "of_finding", "right"),
    [("right", 0, "unknown", True), ("right", 0, "warning", False), ("unknown", 1, "unknown", False)],
)
def test_a_healthy_twin(answer: str, exit_code: int, of_finding: str, right: bool) -> None:
    text = output(answer, {"question": "order", "answer": of_finding})
    assert judged(HEALTHY[0], exit_code, text, "", 1.0).right == right


def test_a_fault_is_named_by_its_id_or_by_its_question_and_cause() -> None:
    by_id = {"question": "gradient", "answer": "differs", "message": {"id": FAULT.kind, "fields": {}}}
    in_words = {"question": "gradient", "answer": "differs", "sentence": "never reduced"}
    elsewhere = {"question": "weights", "answer": "differs", "sentence": "never reduced"}
    rows = [judged(FAULT, 1, output("differs", finding), "", 1.0) for finding in (by_id, in_words, elsewhere)]
    assert [(row.caught, row.named, row.right) for row in rows] == [
        (True, True, False),
        (True, True, False),
        (True, False, False),
    ]
    assert not judged(FAULT, 0, output("right", {"question": "gradient", "answer": "unknown"}), "", 1.0).caught


def test_a_fault_is_located_by_the_line_of_the_script() -> None:
    def row(place: str) -> bool:
        finding = {"question": "gradient", "answer": "differs", "id": FAULT.kind, "place": place}
        return judged(FAULT, 1, output("differs", finding), "", 1.0).right

    number = line_of(FAULT)
    assert row(f"ddp_classifier.py:{number}") and row(f"/tmp/x/ddp_classifier.py:{number} in main")
    assert not row(f"ddp_classifier.py:{number}0") and not row(f"ddp_classifier.py:{number + 1}")


def test_a_training_that_ends_is_caught_by_what_stderr_says() -> None:
    ends = next(fault for fault in FAULTS if fault.kind == "parameters_unused_on_one_rank")
    said = judged(ends, 1, "", "rank 1 has failed: parameters that were not used: aux.weight … unused", 1.0)
    assert said.caught and said.named and not said.located
    assert not judged(ends, None, "", "", 100.0).caught


def test_the_table_counts() -> None:
    rows = [judged(HEALTHY[0], 0, output("right"), "", 1.0), judged(replace(FAULT), None, "", "", 100.0)]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table_of(rows).splitlines()]
    assert ["healthy", "1", "1", "", ""] in cells and ["faulty", "1", "0", "0", "0"] in cells
    assert isinstance(FAULT, Fault)
