"""The file of a rank's heartbeat, as another process reads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from samestep.world import heartbeat
from samestep.world.heartbeat import BACKWARD, LOADING, NONE, Clocks, Heartbeat, Pulse


def test_another_process_reads_what_a_rank_writes(tmp_path: Path) -> None:
    path, writer = heartbeat.file_of(tmp_path, 3), Heartbeat()
    writer.begin(LOADING, 7)  # before it is open: nobody reads it
    writer.open(path)
    writer.begin(LOADING, 7)
    writer.row(400)
    script = (
        "import sys; from pathlib import Path; from samestep.world import heartbeat; "
        "print(heartbeat.read(Path(sys.argv[1])))"
    )
    told = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True).stdout
    assert told.strip() == str(Pulse(2, LOADING, 7, 0, {os.getpid(): 400}))
    writer.row(NONE)
    writer.step(8)
    assert heartbeat.read(path) == Pulse(4, BACKWARD, 8, 1, {})
    for first in (True, False):
        writer.loaded(30, 10, workers=2, prefetch=4, first=first)
    clocks = Clocks(workers=2, prefetch=4, loading_ns=60, loading_cpu_ns=20, first_ns=30)
    assert heartbeat.read(path) == Pulse(4, BACKWARD, 8, 1, {}, clocks)
    writer.build()
    assert heartbeat.read(path) == Pulse(5, heartbeat.BUILDING, NONE, 0, {}, clocks)


def test_a_forked_loader_worker_has_a_slot_of_its_own(tmp_path: Path) -> None:
    path, writer = heartbeat.file_of(tmp_path, 0), Heartbeat()
    writer.open(path)
    writer.begin(LOADING, 2)
    pid = os.fork()
    if pid == 0:
        writer.is_worker(64)  # as many as there are slots, and more, share them
        writer.row(12)
        os._exit(0)
    os.waitpid(pid, 0)
    assert heartbeat.read(path) == Pulse(2, LOADING, 2, 0, {pid: 12}, worker_pids=(pid,))


def test_a_rank_trains_on_where_its_heartbeat_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path / "gone" / "heartbeat-rank0", Path("/dev/full")):
        writer = Heartbeat()
        writer.open(path)
        writer.begin(LOADING, 1)
        assert heartbeat.read(path) is None if path.name != "full" else True
