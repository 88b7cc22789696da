"""The sampler of what this process's descendants use: how often it looks, at whom, and what it keeps."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from samestep.launch.monitor_sampler import OFTEN_SHARE, MonitorSampler
from samestep.message import message
from samestep.records.files import read
from samestep.records.monitor import CSV, SUMMARY, MonitorSummary, read_samples

SLEEPS = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]


def test_a_look_that_takes_long_makes_the_next_one_wait(tmp_path: Path) -> None:
    began = time.monotonic()
    sampler = MonitorSampler(tmp_path, interval=0.0)
    assert 0 < sampler.cost_s / OFTEN_SHARE - sampler.due_in() <= time.monotonic() - began
    sampler.sample_if_due()
    assert len(sampler.samples) == 1
    assert MonitorSampler(tmp_path, interval=1000.0).due_in() > 900


def test_processes_that_are_left_out_do_not_count(tmp_path: Path) -> None:
    others = MonitorSampler(tmp_path).sample().processes
    with (
        subprocess.Popen(SLEEPS, stdin=subprocess.PIPE) as first,
        subprocess.Popen(SLEEPS, stdin=subprocess.PIPE),
    ):
        sampler = MonitorSampler(tmp_path, without=[first.pid])
        assert sampler.sample().processes == others + 1
    assert sampler.sample().processes == others


def test_what_it_keeps_is_whole(tmp_path: Path) -> None:
    sampler = MonitorSampler(tmp_path, interval=0.0)
    began = time.time()
    sampler.sample()
    summary = sampler.close(["a", "command"], 3)
    assert summary == read(MonitorSummary, tmp_path / SUMMARY)
    assert (summary.command, summary.exit_code, summary.samples) == (("a", "command"), 3, 3)
    assert len(read_samples(tmp_path / CSV)) == 3
    assert abs(time.mktime(time.strptime(summary.started, "%Y-%m-%dT%H:%M:%S")) - began) < 2 + time.time() - began
    assert summary.monitor_cores == pytest.approx(sampler.cost_s / summary.seconds)


def test_a_disk_that_is_full_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / CSV).symlink_to("/dev/full")  # which takes no byte
    for folder in (tmp_path, tmp_path / "missing"):
        assert MonitorSampler(folder).close().samples == 2


def test_counters_that_were_hidden_once_are_said_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = MonitorSampler(tmp_path, interval=1000.0)
    use = sampler._tree.use
    monkeypatch.setattr(sampler._tree, "use", lambda: replace(use(), readable=False))
    sampler.sample()
    monkeypatch.undo()
    assert sampler.close().notes == (message("disk_bytes_of_other_users_are_unknown"),)
    assert not MonitorSampler(tmp_path, interval=1000.0).close().notes
