"""horovodrun: the launcher that comes with Horovod.

Source: https://horovod.readthedocs.io/en/stable/running_include.html
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from samestep.errors import UserError
from samestep.launch import Command, FailureReport, Launcher, Machines, RankEnvironment, Shape, only_one_machine
from samestep.launch.rendezvous_address import user_init_method
from samestep.message import Message
from samestep.world import RENDEZVOUS_PORT, RankVariables
from samestep.world.imports import module_arguments

VARIABLES = RankVariables(
    "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK"
)
REPORT = FailureReport(
    killed=(r"Process name: (?P<rank>\d+)\s+Exit code: +(?P<status>1[2-9]\d)",),  # 128 + the signal's number
    exited=(r"Process name: (?P<rank>\d+)\s+Exit code: +(?P<code>(?!1[2-9]\d)[1-9]\d*)",),
)


def plan(program: Sequence[str], shape: Shape) -> Command:
    """One machine, over gloo. Horovod's rendezvous is horovodrun's server; torch's, for the evaluation, is a file.

    Raises UserError for a port: horovodrun takes none.
    """
    if shape.machines.port:
        raise UserError("horovodrun chooses its ports itself; leave --port out, or use another launcher")
    command = (
        sys.executable,
        *module_arguments("horovod.runner.launch"),  # as its script horovodrun does; it starts Python itself
        "-np",
        str(shape.nproc),
        "-H",
        f"localhost:{shape.nproc}",
        "--gloo",
        sys.executable,
        *program,
    )
    init_method = f"file://{shape.folder}/rendezvous"
    return Command(command, {"SAMESTEP_INIT_METHOD": init_method} | VARIABLES.environment())


def missing(machines: Machines, env: Mapping[str, str]) -> Message | None:
    return only_one_machine("horovodrun", machines)


def launched_size(env: Mapping[str, str]) -> int | None:
    return int(env[VARIABLES.size]) if VARIABLES.rank in env else None


def identity(env: Mapping[str, str]) -> str:
    return env.get("HOROVOD_GLOO_RENDEZVOUS_PORT") or "0"


def init_method(env: Mapping[str, str], host: str, port: int) -> str:
    """Raises UserError where the ranks are on several machines and MASTER_ADDR is not set."""
    return user_init_method("horovodrun", env, VARIABLES, f"MASTER_ADDR=h1 MASTER_PORT={RENDEZVOUS_PORT} horovodrun …")


LAUNCHER = Launcher(
    starts=("horovod",),
    variables=VARIABLES,
    plan=plan,
    missing=missing,
    report=REPORT,
    environment=RankEnvironment(
        "HOROVOD_", launched_size, identity, init_method, one_on_each="-np {machines} -H {hosts}"
    ),
    one_machine=True,
)
