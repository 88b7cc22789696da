"""Reports a second --node-rank 0 to the machine that has this number, which would wait in vain for another one."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from samestep.errors import TrainingFailed
from samestep.world.imports import module_arguments
from samestep.world.network import dial
from samestep.world.processes import die_with_parent, wait_for

MOST_S = 30.0  # that machine's command may have been typed a moment later, and imports torch first
POLL_S = 0.2
DIAL_S = 2.0


def report(master: str, port: int, nnodes: int, timeout_s: float) -> bool:
    """Joins the rendezvous at `master` as machine 0 again, so that its command fails and names the duplicate number.

    Waits until that command listens, for at most 30 s. Returns whether it was reached.
    """
    until = time.monotonic() + min(timeout_s, MOST_S)
    while dial(master, port, DIAL_S).outcome != "open":
        if time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    joining = subprocess.Popen(
        [sys.executable, *module_arguments("samestep.rank.rendezvous"), master, str(port), str(nnodes)],
        env={"TORCH_CPP_LOG_LEVEL": "ERROR"} | os.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
    )
    try:
        return wait_for(joining, f"{master} still does not take this mistake", deadline_s=timeout_s + MOST_S) == 0
    except TrainingFailed:
        return False
