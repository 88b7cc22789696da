"""Runs scripts on forked ranks without a recorder: torch is imported once for all of them."""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch


def run(script: Path, arguments: Sequence[str], nproc: int, limit_s: float) -> tuple[list[str], str]:
    """Runs a script in its folder to its end; returns what each rank printed, and 'ended', 'failed' or 'hangs'."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outputs = [script.parent / f".rank{rank}.log" for rank in range(nproc)]
    children = []
    for rank, output in enumerate(outputs):
        pid = os.fork()
        if not pid:
            _be_rank(script, arguments, {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "PORT": port}, output)
        children.append(pid)
    end, left, failed = time.monotonic() + limit_s, {*children}, False
    while left and time.monotonic() < end and not failed:
        for pid in tuple(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                left.discard(pid)
                failed = failed or status != 0
        time.sleep(0.05)
    hangs = bool(left) and not failed
    for pid in left:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [output.read_text() for output in outputs], "hangs" if hangs else "failed" if failed else "ended"


def _be_rank(script: Path, arguments: Sequence[str], values: dict[str, int], output: Path) -> None:
    code = 1
    try:
        os.setsid()
        written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(written, 1)
        os.dup2(written, 2)
        os.chdir(script.parent)
        sys.path.insert(0, str(script.parent))
        port = values.pop("PORT")
        os.environ.update({name: str(value) for name, value in values.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
        sys.argv = [script.name, *arguments]
        torch.set_num_threads(1)
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc(limit=-2)
    finally:
        sys.stdout.flush()
        os._exit(code)
