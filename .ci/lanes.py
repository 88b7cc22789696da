"""Runs `make test` or `make check`, and says whether each of its tests has run and passed.

    python3 .ci/lanes.py test                  README's command, as a user has it: what is not installed is skipped
    python3 .ci/lanes.py rest                  the tests of `make test` that were skipped or absent then
    python3 .ci/lanes.py check --minutes 50    make check, and how long it may take

A run is red unless pytest has collected all files, begun all tests and ended all of them, and each has passed or was
skipped for a reason that is expected here. One to three tests that failed beside others run once more, alone: a busy
machine is told from a defect. A crash, a hang, an error of pytest's own and a test that never began are red at once.

Only where importing torch takes longer than SLOW_IMPORT_S may --minutes leave tests out: at most a fifth, none of a
file that the last NEWEST commits have touched, and each of them is listed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = str(ROOT / ".venv/bin/python")
WRITTEN = Path(".venv/outcomes")  # a folder
MARKS = "not check and not full"  # of make test
SLOW_IMPORT_S = 2.5
NEWEST = 40  # commits
MOST_LEFT_OUT = 1 / 5
MOST_RERUN = 3
STALL_S = 1500.0  # a test has a deadline of its own, at most this on the slowest machine
LEFT_OUT = "NOT RUN"  # begins the reason of tests for which there was no time: see tests/outcomes.py
PASSED, FAILED, INTERRUPTED, INTERNAL_ERROR, USAGE_ERROR, NOTHING_COLLECTED = range(6)  # pytest's exit codes
EXIT_CODES = {
    INTERRUPTED: "it was interrupted, or stopped after too many failures",
    INTERNAL_ERROR: "an error of pytest's own, or of a plugin's",
    USAGE_ERROR: "pytest was called wrongly",
    NOTHING_COLLECTED: "no test was collected",
}
# Why a test may be skipped where everything is installed that this script's caller installs.
EXPECTED_SKIPS = (
    r"torch sees no CUDA device here",
    r"no-op on CPU",
    r"(fairscale|ray|wandb) is not installed",  # large, or of old versions of torch
    r"there is no record of it: unavailable",
)


@dataclass
class Outcomes:
    """What a run of pytest has written of its tests. exit: pytest's code; None where it did not come to its end."""

    collected: set[str] = field(default_factory=set)
    begun: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)  # test -> the first line of why
    skipped: dict[str, str] = field(default_factory=dict)  # test, or a whole file -> why
    crashed: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    exit: int | None = None

    @property
    def passed(self) -> set[str]:
        return self.ended - set(self.failed) - set(self.skipped) - self.crashed


@dataclass
class Verdict:
    """red: why the run is not what it should be. rerun: tests that failed and may run once more. left_out: tests for
    which there was no time."""

    red: list[str]
    rerun: list[str]
    left_out: list[str]


def read_outcomes(path: Path) -> Outcomes:
    """Reads the lines that tests/outcomes.py has written; none where there is no file."""
    outcomes = Outcomes()
    for line in path.read_text().splitlines() if path.exists() else ():
        match json.loads(line):
            case {"collected": tests}:
                outcomes.collected |= {*tests}
            case {"begun": test}:
                outcomes.begun.add(test)
            case {"test": test, "when": when, "outcome": outcome, "why": why}:
                if when == "teardown":
                    outcomes.ended.add(test)
                if outcome == "failed":
                    outcomes.failed.setdefault(test, why)
                elif outcome == "skipped":
                    outcomes.skipped[test] = why
            case {"skipped_file": file, "why": why}:
                outcomes.skipped[file] = why
            case {"not_collected": file, "why": why}:
                outcomes.problems.append(f"{file or 'a file'} was not collected: {why}")
            case {"crashed": test}:
                outcomes.crashed.add(test)
            case {"problem": problem}:
                outcomes.problems.append(problem)
            case {"exit": code}:
                outcomes.exit = code
    return outcomes


def judge(
    outcomes: Outcomes, *, skips: Sequence[str], leaves_out: bool = False, newest: Collection[str] = ()
) -> Verdict:
    """Judges a run. skips: patterns of the reasons that are expected. leaves_out: whether there may be no time for
    some tests. newest: files none of whose tests may be left out."""
    red = list(outcomes.problems)
    if outcomes.exit is None:
        red.append("pytest did not come to its end")
    elif outcomes.exit not in (PASSED, FAILED):
        red.append(f"pytest ended with code {outcomes.exit}: {EXIT_CODES.get(outcomes.exit, 'unknown')}")
    if not outcomes.collected:
        red.append("no test was collected")
    hung = {test for test, why in outcomes.failed.items() if "Timeout (>" in why}
    red += [f"{test} crashed its process" for test in sorted(outcomes.crashed)]
    red += [f"{test} hung: {outcomes.failed[test]}" for test in sorted(hung - outcomes.crashed)]
    red += [f"{test} was collected, and never began" for test in sorted(outcomes.collected - outcomes.begun)]
    red += [f"{test} began, and never ended" for test in sorted(outcomes.begun - outcomes.ended - outcomes.crashed)]
    left_out = sorted(test for test, why in outcomes.skipped.items() if why.startswith(LEFT_OUT))
    if not leaves_out:
        red += [f"{test} was left out" for test in left_out]
    if len(left_out) > MOST_LEFT_OUT * len(outcomes.collected):
        red.append(f"{len(left_out)} of {len(outcomes.collected)} tests were left out, more than a fifth")
    red += [f"{test} is new, and was left out" for test in left_out if test.partition("::")[0] in newest]
    unexpected = {test: why for test, why in outcomes.skipped.items() if not any(re.match(skip, why) for skip in skips)}
    red += [f"{test} was skipped: {unexpected[test]}" for test in sorted(set(unexpected) - set(left_out))]
    failed = sorted(set(outcomes.failed) - hung - outcomes.crashed)
    if len(failed) > MOST_RERUN or (red and failed):
        red += [f"{test} failed: {outcomes.failed[test]}" for test in failed]
        failed = []
    if outcomes.exit == FAILED and not failed and not red:
        red.append("pytest ended with code 1, and no test has failed")
    return Verdict(red, failed, left_out)


def newest_files(root: Path, commits: int = NEWEST) -> set[str] | None:
    """Returns the files that the last commits have touched; None where git does not know so many of them."""
    command = ["git", "-C", str(root), "log", f"-{commits}", "--format=commit %H", "--name-only", "--no-renames"]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if done.returncode or sum(line.startswith("commit ") for line in lines) < commits:
        return None
    return {line for line in lines if line and not line.startswith("commit ")}


def import_s() -> float:
    """Returns the seconds that importing torch takes here: the best of three."""
    taken = []
    for _ in range(3):
        began = time.monotonic()
        subprocess.run([PYTHON, "-c", "import torch"], check=True)
        taken.append(time.monotonic() - began)
    return min(taken)


def pytest_options(file: str) -> list[str]:
    """Returns pytest's options with which it writes its outcomes to a file of WRITTEN."""
    (ROOT / WRITTEN / file).unlink(missing_ok=True)
    return [f"--outcomes={WRITTEN / file}"]  # one word: a second would be a file of tests to pytest's workers


def run(command: Sequence[str], written: Path, stall_s: float) -> int:
    """Runs a command in the project's folder. Returns its exit code.

    written: the file of a run's outcomes. Where it exists, and does not grow for `stall_s` seconds, the command is
    ended with all that it has started: xdist may wait for ever for workers that have crashed.
    """
    print(f"CI: {shlex.join(command)}", flush=True)
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
        size, since = -1, time.monotonic()
        while process.poll() is None:
            time.sleep(0.1)
            grown = written.stat().st_size if written.exists() else -1
            if grown != size:
                size, since = grown, time.monotonic()
            if size >= 0 and time.monotonic() - since > stall_s:
                print(f"CI: no test has begun or ended for {stall_s:.0f} s", flush=True)
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode


def run_tests(tests: Sequence[str], file: str, stall_s: float, *options: str) -> Outcomes:
    """Runs these tests, and returns what came of them."""
    run([PYTHON, "-m", "pytest", *options, *pytest_options(file), *tests], ROOT / WRITTEN / file, stall_s)
    return read_outcomes(ROOT / WRITTEN / file)


def settle(verdict: Verdict, lane: str, skips: Sequence[str], stall_s: float) -> int:
    """Prints a verdict; runs the failed tests once more, alone, where they may. Returns this script's exit code."""
    for test in verdict.left_out:
        print(f"CI: {LEFT_OUT}: {test}")
    red = verdict.red
    if verdict.rerun and not red:
        print(f"CI: these failed beside others, and run once more, alone: {' '.join(verdict.rerun)}")
        again = judge(run_tests(verdict.rerun, f"{lane}-alone.jsonl", stall_s), skips=skips)
        red = [*again.red, *(f"{test} failed twice" for test in again.rerun)]
        if not red:
            print(f"CI: FLAKY: {' '.join(verdict.rerun)} failed once, and passed alone; find out why")
    for why in red:
        print(f"CI: RED: {why}")
    print(f"CI: {lane} is {'red' if red else 'green'}", flush=True)
    return bool(red)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lane", choices=("test", "rest", "check"))
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--stall", type=float, default=STALL_S, help="seconds without news of a test")
    arguments = parser.parse_args()
    lane, skips, stall_s = arguments.lane, EXPECTED_SKIPS, arguments.stall
    # Where many tests fail or hang, the first ten say why; the others would only take the time in which CI must end.
    options = ["--maxfail=10"]
    if lane == "rest":
        before = read_outcomes(ROOT / WRITTEN / "test.jsonl")
        here = run_tests((), "here.jsonl", stall_s, "-qq", "--collect-only", "-m", MARKS)
        remaining = sorted(here.collected - before.passed - set(before.failed))
        outcomes = (
            run_tests(remaining, "rest.jsonl", stall_s, *options, "-n", "2", "--dist", "loadfile")
            if remaining
            else here
        )
        nothing = here.problems or ([] if here.collected else ["no test was collected"])
        return settle(judge(outcomes, skips=skips) if remaining else Verdict(nothing, [], []), lane, skips, stall_s)
    leaves_out, newest = False, newest_files(ROOT)
    if lane == "test":
        skips = (r"",)  # what was not here is told and run by `rest`
    elif arguments.minutes is not None and newest is not None and import_s() > SLOW_IMPORT_S:
        leaves_out = True
        options += [f"--minutes={arguments.minutes}", *(f"--always={file}" for file in sorted(newest))]
    written = ROOT / WRITTEN / f"{lane}.jsonl"
    made = run(["make", lane, f"PYTEST_MORE={shlex.join([*options, *pytest_options(written.name)])}"], written, stall_s)
    outcomes = read_outcomes(written)
    verdict = judge(outcomes, skips=skips, leaves_out=leaves_out, newest=newest or ())
    if made and outcomes.exit in (None, PASSED):  # ruff, mypy, or an installation
        verdict.red.append(f"make {lane} ended with code {made}")
    return settle(verdict, lane, skips, stall_s)


if __name__ == "__main__":
    sys.exit(main())
