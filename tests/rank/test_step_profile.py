"""run --profile: a trace of each rank, for exactly the optimizer steps that were named."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from command import DIGITS, samestep
from samestep.commands.training_options import _profile
from samestep.errors import UserError
from samestep.message import message
from samestep.report.language import text

RUN = ("run", *DIGITS, "--set", "epochs=1", "--nproc", "2")


def test_a_trace_of_each_rank_has_exactly_the_steps(tmp_path: Path) -> None:
    done = samestep(*RUN, "--evaluate-steps", "4", "--profile", "steps=3..6", out=tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "profiler_start" not in done.stderr
    for rank in range(2):
        path = tmp_path / "out" / "trace" / f"steps3-6-rank{rank}.json.gz"
        assert f"trace: {path}" in done.stdout
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        spans = [event for event in events if event.get("ph") == "X"]
        names = Counter(event["name"] for event in spans)
        assert {name: count for name, count in names.items() if name.startswith("step ")} == {
            f"step {number}": 1 for number in range(3, 7)
        }
        assert names["Optimizer.step#SGD.step"] == names["DistributedDataParallel.forward"] == 4
        steps = [event for event in spans if event["name"].startswith("step ")]
        updates = [event for event in spans if event["name"] == "Optimizer.step#SGD.step"]
        for step in steps:  # one update each, within it
            end = step["ts"] + step["dur"]
            assert sum(step["ts"] <= each["ts"] and each["ts"] + each["dur"] <= end for each in updates) == 1


def test_steps_that_there_are_not(tmp_path: Path) -> None:
    done = samestep(*RUN, "--profile", "steps=1000..1001", out=tmp_path / "out")
    assert done.returncode == 2
    assert text(message("profile_begins_after_the_training", steps=24, last=999), "en") in done.stderr


@pytest.mark.parametrize("text", ["10..20", "steps=", "steps=0..3", "steps=5..4", "steps=a..b", "steps=1..2..3"])
def test_bad_values_are_one_sentence(text: str) -> None:
    with pytest.raises(UserError, match="--profile steps=10"):
        _profile(text)


def test_one_step_and_several() -> None:
    assert _profile("steps=7") == (7, 7)
    assert _profile("steps=10..20") == (10, 20)
