"""Which cases are drawn, and how what was found is compared with what is kept."""

from __future__ import annotations

from pathlib import Path

from golden.found import (
    LARGE,
    Found,
    at_step,
    counts,
    differences,
    drawn,
    found_of_check,
    found_of_failure,
    read_all,
    table,
    write_all,
)
from samestep.message import Message
from samestep.records.call_site import CallSite
from samestep.records.findings import CheckResults, Finding
from samestep.records.results import Divergence

CASES = {f"twins/{number}": "twins rows" for number in range(400)}
KEPT = {name: Found(name, "differs", 1, "rows at step 0", ["rows differs a_cause train.py:3"]) for name in CASES}


def test_another_case_moves_none_of_those_that_are_drawn() -> None:
    before = drawn(CASES)
    assert 20 < len(before) < 60
    assert drawn(CASES | {f"more/{number}": "twins rows" for number in range(100)}) >= before
    assert drawn(dict(reversed(CASES.items()))) == before


def test_each_large_group_has_a_case() -> None:
    groups = {f"{group}/{number}": f"group {group}" for group in range(50) for number in range(LARGE)}
    assert {groups[name] for name in drawn(groups)} == {*groups.values()}
    assert not drawn({f"small/{number}": "small" for number in range(LARGE - 1)}, share=0)


def test_what_differs_is_told_by_case() -> None:
    same, other, added = "twins/1", "twins/2", "twins/new"
    expected = {name: KEPT[name] for name in (same, other, "twins/3")}
    found = {
        same: KEPT[same],
        other: Found(other, "right", 0),
        added: Found(added, "right", 0),
    }
    rows = differences(expected, found, [same, other, added])
    assert [(row.case, row.what) for row in rows] == [
        *((other, what) for what in ("answer", "code", "first", "findings")),
        (added, "new"),
        ("twins/3", "gone"),
    ]
    cells = [line.strip("| ").split(" | ") for line in table(rows).splitlines()]
    assert [other, "answer", "differs", "right"] in cells
    numbers = dict(reversed(part.split()) for part in counts(expected, found, rows, 5).split(", "))
    assert numbers == {"unchanged": "1", "changed": "1", "new": "1", "gone": "1", "skipped": "5"}
    assert differences(expected, {same: KEPT[same]}, expected) == [], "a case that is not drawn is not gone"


def test_cases_are_kept_a_line_each_in_the_order_of_their_names(tmp_path: Path) -> None:
    file = tmp_path / "expected.jsonl"
    write_all(dict(reversed(KEPT.items())), file)
    assert read_all(file) == KEPT
    assert [*read_all(file)] == sorted(KEPT)
    assert read_all(tmp_path / "absent") == {}


def test_a_finding_is_told_with_its_ids_and_the_lines_of_the_users_files(tmp_path: Path) -> None:
    message = Message("outer", {"inner": Message("inner", {}), "number": 0.25})
    sites = [CallSite(str(tmp_path / "train.py"), 7), CallSite("/lib/torch/nn.py", 9)]
    divergence = Divergence("check", 2, "gradient", None, None, 1.0, 2.0)
    side = [CallSite("main:train.py", 5)]
    found = found_of_check(
        "case",
        1,
        CheckResults(
            "train.py",
            [],
            2,
            3,
            "differs",
            [
                Finding("gradient", "differs", message, divergence, sites, expected_sites=side),
                Finding("rows", "right", message),
            ],
            divergence,
            record_share=0.5,
            folder="",
        ),
        [tmp_path],
    )
    line = "gradient differs outer inner train.py:7 instead of main:train.py:5"
    assert found == Found("case", "differs", 1, at_step("gradient", 2), [line])


def test_a_command_that_fails_or_hangs_is_told_with_its_reason() -> None:
    error = 'File "/tmp/x/train.py", line 12, in f\nFile "/lib/torch/a.py", line 3\ntrain.py:14: it raised'
    reason = Message("rank_failed", {})
    failed = Found("case", "failed", 1, "", ["reason rank_failed train.py:12 train.py:14"])
    assert found_of_failure("case", 1, reason, error, ["train.py"]) == failed
    assert found_of_failure("case", None, None, "", []) == Found("case", "hangs", None)
