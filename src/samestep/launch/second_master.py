"""Tells the machine of --node-rank 0 that another one has been given its number, so that it does not wait in vain."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from samestep.world.orphans import die_with_parent
from samestep.world.wire import dial

MOST_S = 30.0  # that machine's command may have been typed a moment later, and imports torch first
POLL_S = 0.2
DIAL_S = 2.0


def notify(master: str, port: int, nnodes: int, timeout_s: float) -> bool:
    """Joins the rendezvous at `master` a second time as machine 0, which its command then reports; returns whether.

    Waits until that command listens, for at most 30 s.
    """
    until = time.monotonic() + min(timeout_s, MOST_S)
    while dial(master, port, DIAL_S).outcome != "open":
        if time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    done = subprocess.run(
        [sys.executable, "-m", "samestep.rank.second_master", master, str(port), str(nnodes)],
        env={"TORCH_CPP_LOG_LEVEL": "ERROR"} | os.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
    )
    return done.returncode == 0
