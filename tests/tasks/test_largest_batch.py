"""A batch that does not fit into memory, which is really limited here: the sentence names one that does."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from command import WATCHED as JOBS
from command import samestep
from samestep.message import message
from samestep.report.language import text


def run(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return samestep("run", f"{JOBS}:greedy", "--nproc", "2", "--json", *words, out=out)


@pytest.mark.check
def test_it_names_a_micro_batch_that_fits(tmp_path: Path) -> None:
    done = run(tmp_path / "whole")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    fields = {"step": 0, "rows": 8, "fits": 4}
    said = [text(message("out_of_memory_with_so_many_rows", rank=rank, **fields), "en") for rank in (0, 1)]
    assert any(sentence in done.stderr for sentence in said), done.stderr
    parts = run(tmp_path / "parts", "--set", "micro_batch=4")
    assert parts.returncode == 0, parts.stderr
    roomy = run(tmp_path / "roomy", "--set", "spare_mib=4000")
    losses = [[entry["loss"] for entry in json.loads(each.stdout)["curve"]] for each in (parts, roomy)]
    assert [round(loss, 5) for loss in losses[0]] == [round(loss, 5) for loss in losses[1]]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("mib=600", "has too little memory for the model, its gradients and the state of "),
        ("mib=2000", "has too little memory for the model, its gradients and the state of "),
        ("mib=1 once_mib=2000", "step 3: rank 0 ran out of memory, though its 16 rows fit by"),
    ],
)
def test_memory_that_is_not_for_rows(settings: str, says: str, tmp_path: Path) -> None:
    words = [word for pair in settings.split() for word in ("--set", pair)]
    done = samestep("run", f"{JOBS}:heavy", "--nproc", "1", *words, out=tmp_path / "out")
    assert done.returncode == 2 and says in done.stderr and "micro_batch=" not in done.stderr, done.stderr


def test_a_model_that_does_not_fit_with_one_row(tmp_path: Path) -> None:
    done = run(tmp_path / "out", "--set", "mib_a_row=1200")
    assert done.returncode == 2
    assert "with 1 as" in done.stderr
