"""ray: Ray Train's TorchTrainer, which starts the ranks itself, on a Ray cluster of its own on this machine.

Source: https://docs.ray.io/en/latest/train/getting-started-pytorch.html
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from samestep.errors import UserError
from samestep.launch import Command, Launcher, Machines, Shape, only_one_machine
from samestep.message import Message
from samestep.world import RankVariables

VARIABLES = RankVariables()  # which TorchTrainer sets
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
}


def plan(program: Sequence[str], shape: Shape) -> Command:
    """The rendezvous is TorchTrainer's own. Raises UserError for a port: it chooses one itself."""
    if shape.machines.port:
        raise UserError("TorchTrainer chooses its ports itself; leave --port out, or use another engine")
    *head, path = program
    return Command((sys.executable, *head, "--ray", str(shape.nproc), path), VARIABLES.environment() | SETTINGS)


def missing(machines: Machines, env: Mapping[str, str]) -> Message | None:
    return only_one_machine("ray", machines)


LAUNCHER = Launcher(
    starts=("ray",),
    variables=VARIABLES,
    plan=plan,
    missing=missing,
    # No report: a rank that ends early has written why; of one that leaves without a word ray says no number.
    one_machine=True,
    gets_signals=False,  # its ranks run in threads, which get none
)
