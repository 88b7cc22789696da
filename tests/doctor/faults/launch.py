"""Faults of the launch: variables that launchers set, and the port."""

from __future__ import annotations

import sys

from doctor.faults.fault import Fault, env

SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SRUN |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
HOLDER = 'import socket, time; s = socket.create_server(("127.0.0.1", 29533)); time.sleep(60)'
FAULTS = (
    env("RANK is left in the shell", "launch_variables", "launcher_variables_are_stale", RANK="0", WORLD_SIZE="1"),
    env(
        "RANK is not below WORLD_SIZE",
        "launch_variables",
        "launcher_variables_contradict",
        RANK="5",
        WORLD_SIZE="2",
        LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29555",
    ),
    env("WORLD_SIZE alone", "launch_variables", "launcher_variables_contradict", WORLD_SIZE="4", RANK="0"),
    Fault(
        "WORLD_SIZE contradicts Slurm",
        "launch_variables",
        "launcher_variables_contradict",
        env=SRUN | {"WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0"},
    ),
    env("MASTER_PORT=http", "launch_variables", "master_port_is_no_port", MASTER_PORT="http"),
    Fault(
        "the port is held",
        "port",
        "port_is_taken_by_process",
        f"{sys.executable} -c '{HOLDER}' & sleep 1; \"$@\"; code=$?; kill $!; exit $code",
        options=("--port", "29533"),
    ),
)
