"""A log that is too long is cut while its rank writes to it, from Python and from C alike."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from budget import budget, wait_until
from samestep.launch import rank_logs
from samestep.launch.rank_logs import LogRotation, RankOutput, cut

RANK = """
import ctypes, os, sys
from pathlib import Path
from samestep.rank.log_output import log_to
log_to(Path(sys.argv[1]))
libc = ctypes.CDLL(None)
for number in range(20_000):
    print("python", number, "x" * 80)
    libc.dprintf(2, b"c %d\\n", number)
    if number % 2000 == 1999:
        Path(sys.argv[1] + f".at{number}").touch()
        while not os.path.exists(sys.argv[1] + f".on{number}"):
            pass
"""


def test_a_log_is_cut_while_its_rank_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_logs, "EVERY_S", 0.0)
    shown: list[str] = []
    log, output = tmp_path / "rank0.log", RankOutput(tmp_path, lambda _, text: shown.append(text))
    rank, rotation = subprocess.Popen([sys.executable, "-c", RANK, str(log)]), LogRotation(tmp_path, 150_000)
    for number in range(1999, 20_000, 2000):  # while it waits, so that no line may be lost
        wait_until(Path(f"{log}.at{number}").exists, "the rank does not write")
        output.print_new()
        rotation.rotate()
        assert log.stat().st_size == 0
        Path(f"{log}.on{number}").touch()
    assert rank.wait(budget()) == 0
    kept = Path(f"{log}.1").read_text().splitlines()
    assert [line.split()[:2] for line in kept] == [
        [by, str(n)] for n in range(18_000, 20_000) for by in ("python", "c")
    ]
    assert sum(path.stat().st_size for path in tmp_path.glob("rank0.log*")) < 400_000
    output.print_new(last=True)
    assert "python 19999 " + "x" * 80 in shown and "c 19999" in shown
    assert any("lines more in" in line for line in shown)


def test_a_line_that_a_cut_divides_is_shown_whole(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    shown: list[str] = []
    output = RankOutput(tmp_path, lambda _, text: shown.append(text))
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    whole = "a größe\n".encode()
    os.write(file, whole[:5])  # within the ö
    output.print_new()
    cut(log)
    os.write(file, whole[5:])
    assert log.read_bytes() == whole[5:]  # without a hole
    output.print_new(last=True)
    assert shown == ["a größe"]


def test_a_cut_on_a_full_disk_loses_the_copy_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "rank0.log"
    log.write_bytes(bytes(100))
    (tmp_path / "rank0.log.1").mkdir()  # nothing can be put there
    cut(log)
    assert log.stat().st_size == 0
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["rank0.log"]
