"""horovodrun: the launcher that comes with Horovod.

Source: https://horovod.readthedocs.io/en/stable/running_include.html
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from samestep.errors import UserError
from samestep.launch import Plan, Shape


def plan(program: Sequence[str], shape: Shape) -> Plan:
    """One machine, over gloo. Horovod's ranks meet at a server of horovodrun's; torch's, for the evaluation, at a file.

    Raises UserError for a port: horovodrun takes none.
    """
    if shape.machines.port:
        raise UserError("horovodrun chooses its ports itself; leave --port out, or use another launcher")
    command = (
        str(Path(sys.executable).with_name("horovodrun")),
        "-np",
        str(shape.nproc),
        "-H",
        f"localhost:{shape.nproc}",
        "--gloo",
        sys.executable,
        *program,
    )
    meeting = f"file://{shape.folder}/rendezvous"
    return Plan(command, {"SAMESTEP_INIT_METHOD": meeting, "SAMESTEP_STARTED_BY": "horovodrun"})
