"""torchrun: python -m torch.distributed.run, the launcher that comes with PyTorch.

`python -m torch.distributed.launch` is its deprecated spelling: it warns, and passes --local-rank as an argument.
Source: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from samestep.launch import Plan, Shape


def plan(program: Sequence[str], shape: Shape) -> Plan:
    """One machine. Port 0 lets the rendezvous choose a free one."""
    return Plan(
        (
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={shape.nproc}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{shape.port}",
            "--local-addr=127.0.0.1",
            "--max-restarts=0",
            "--monitor-interval=0.05",
            f"--log-dir={shape.folder}/torchrun",
            "--no-python",
            sys.executable,
            *program,
        )
    )
