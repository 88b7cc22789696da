"""What docs/testing.md promises of a test on several ranks: each fault is planted in promises.py, and seen."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from budget import import_s
from testing.runs import run


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest prints of promises.py."""
    done = run(tmp_path_factory.mktemp("promises"), Path(__file__).with_name("promises.py").read_text(), "-rA", "-v")
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def section(printed: str, name: str) -> str:
    """The part of pytest's output that shows a test which failed."""
    found = re.search(rf"^_+ (ERROR at \w+ of )?{name} _+$(.*?)^(_{{5}}|={{5}})", printed, re.M | re.S)
    assert found, f"{name} is not shown as failed:\n{printed}"
    return found[2]


pytestmark = pytest.mark.check  # a run of pytest with many tests of several ranks

PASSED = [
    "test_sum",
    "test_without_a_group",
    "test_fixtures[3-1]",
    "test_fixtures[3-2]",
    "test_the_environment_is_as_before",
    "TestClass::test_method",
    "test_after_a_broken_group",
    "test_after_a_death",
    "test_threads",
    "test_threads_after_a_failure",
    "test_forks",
    "test_after_a_fork",
]


@pytest.mark.parametrize("name", PASSED)
def test_passes(name: str, printed: str) -> None:
    assert f"PASSED test_it.py::{name}\n" in printed


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (
            "test_assert",
            [
                *("rank 0: passed", "rank 1: failed", "---- rank 1 ----"),
                "E       AssertionError: assert {'rank': 1} == {'rank': 0}",
                *("Captured stdout call, rank 0 -", "printed by 0", "Captured stdout call, rank 1 -", "printed by 1"),
            ],
        ),
        ("test_both_fail", ["---- ranks 0, 1 ----", "E       assert 2 == 5", "where 2 = "]),
        ("test_leaves_the_group_broken", ["ValueError: planted", "rank 0: process", "it waits in gloo:barrier #"]),
        (
            "test_sleeps",
            [
                *("rank 0: process", "had not ended after SECONDS s", "time.sleep(1000)", "rank 1: process"),
                *("it waits in gloo:all_reduce #1, shapes [[3]]", "dist.all_reduce(torch.ones(3))"),
            ],
        ),
        ("test_holds_the_gil", ["rank 1: process", "had not ended after SECONDS s", "in test_holds_the_gil"]),
        ("test_alarm_of_pytest_timeout", ["Timeout (>SECONDS.0s) from pytest-timeout"]),
        ("test_killed", ["was killed by signal 9 (SIGKILL)", "Captured stdout call, rank 1 -", "last words"]),
        ("test_exits", ["exited with code 3 during the test"]),
        ("test_skips_differ", ["rank 0: passed", "rank 1: skipped (not on this rank)"]),
        ("test_unknown_backend", ["this torch has no backend 'planted'"]),
        ("test_setup_fails", ["AssertionError: assert '1' == '0'", "rank 0: process", "it waits in gloo:barrier"]),
        ("test_teardown_fails", ["---- rank 1 ----", "AssertionError: assert '1' == '0'"]),
        (
            "test_a_thread_fails",
            [
                *("rank 2: failed", "ranks 0, 1, 3: stopped in a collective", "assert 2 != 2"),
                *("Captured stdout call, threads -", "[rank 0] printed by 0", "[rank 3] printed by 3"),
            ],
        ),
        (
            "test_subtests_fail",
            ["contains 2 failed subtests", "(number=1) ----", "assert 1 < (1 + 0)", "contains 1 failed subtest\n"],
        ),
        ("TestUnittest.test_subtests", ["contains 1 failed subtest\n", "(number=1) ----", "assert 1 == 0"]),
        ("test_calls_pytest_exit", ["---- rank 1 ----\ncalled pytest.exit: enough\n"]),
        ("test_raises_an_interrupt", ["KeyboardInterrupt was raised at ", ", in test_raises_an_interrupt"]),
        ("test_a_thread_sleeps", ["---- rank 3 ----", "time.sleep(1000)", "---- rank 0 ----", "dist.barrier()"]),
    ],
)
def test_failure_is_shown(name: str, shown: list[str], printed: str) -> None:
    found = section(printed, name)
    lines = [line.replace("SECONDS", str(round(import_s()))) for line in shown]
    assert [line for line in lines if line not in found] == [], found


def test_a_failure_is_shown_with_its_rank_in_the_summary(printed: str) -> None:
    assert "FAILED test_it.py::test_assert - rank 1: AssertionError: assert {'rank': 1} == {'rank': 0}" in printed
    assert re.search(r"^FAILED test_it.py::test_killed - rank 1: process \d+ was killed by signal 9", printed, re.M)
    assert "ERROR test_it.py::test_setup_fails - rank 1: " in printed


def test_a_test_that_all_ranks_skip_is_skipped(printed: str) -> None:
    skipped = re.findall(r"^SKIPPED \[1\] test_it.py:\d+: (.+)$", printed, re.M)
    assert {"on no rank", "not here"} <= {*skipped}
    expected_to_fail = re.findall(r"^XFAIL test_it.py::(\w+) - (.+)$", printed, re.M)
    assert ("test_xfails", "known") in expected_to_fail


def test_fixtures_of_a_module_are_evaluated_once_on_each_rank(printed: str) -> None:
    for rank in (0, 1):
        assert printed.count(f"opened by {rank}\n") == 1


def test_what_a_killed_rank_has_started_ends_with_it(printed: str) -> None:
    started = [int(pid) for pid in re.findall(r"^started (\d+)$", printed, re.M)]
    assert started
    assert [pid for pid in started if is_running(pid)] == []


def is_running(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return process.name() == "sleep" and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_nothing_is_counted_twice(printed: str) -> None:
    # test_teardown_fails has passed, and its teardown is an error, as in pytest
    counts = dict((word, int(number)) for number, word in re.findall(r"(\d+) (\w+)[, ]", printed.splitlines()[-1]))
    assert counts == {"failed": 15, "passed": len(PASSED) + 1, "skipped": 2, "xfailed": 1, "errors": 3}
