"""Whose rank this command is, and what contradicts itself: each a sentence with the line to type."""

from __future__ import annotations

import pytest

from said import refuses
from samestep.commands.machines import detect_launched_rank, refuse_under_launcher
from samestep.commands.setup import Setup
from samestep.errors import UserError
from samestep.launch.launchers import srun
from samestep.launch.outer_launcher import launched_rank, outer_launcher, refuse_to_start_more
from samestep.world.network import slurm_port

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "b7",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "h1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "71234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "123",
}
HOROVODRUN = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "0",
    "HOROVOD_LOCAL_SIZE": "1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
}
BY_HAND = {key: TORCHRUN[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({}, None),
        (TORCHRUN, ("torchrun", 3, 4, 1, 2, "b7", "env://")),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, ("torchrun", 3, 4, 1, 2, "h1-29500", "env://")),
        (BY_HAND, ("torchrun", 3, 4, 1, 1, "h1-29500", "env://")),
        (SRUN, ("srun", 2, 3, 0, 1, "71234.0", "tcp://n1:21234")),
        (SRUN | {"MASTER_ADDR": "fd77::1", "MASTER_PORT": "5"}, ("srun", 2, 3, 0, 1, "71234.0", "tcp://[fd77::1]:5")),
        (MPIRUN, ("mpirun", 1, 2, 1, 2, "123", "")),
        (
            HOROVODRUN | {"MASTER_ADDR": "h1", "MASTER_PORT": "29500"},
            ("horovodrun", 1, 2, 0, 1, "4711", "tcp://h1:29500"),
        ),
        # Alone, though a launcher is there: one task; a batch script; salloc's shell; our own children.
        (SRUN | {"SLURM_NTASKS": "1"}, None),
        ({key: value for key, value in SRUN.items() if key != "SLURM_STEP_ID"}, None),
        (SRUN | {"SLURM_STEP_ID": "4294967290"}, None),
        (TORCHRUN | {"SAMESTEP_COMMAND": "1@h1"}, None),
    ],
)
def test_whose_rank(env: dict[str, str], found: tuple[object, ...] | None) -> None:
    launcher = outer_launcher(env)
    place = launcher and launched_rank(env, launcher, "n1", slurm_port(env.get("SLURM_JOB_ID", "0")))
    assert (
        place
        and (place.launcher, place.rank, place.size, place.local_rank, place.local_size, place.id, place.init_method)
    ) == found


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        (SRUN | {"WORLD_SIZE": "8"}, "WORLD_SIZE=8 contradicts srun's SLURM_NTASKS=3; type `unset RANK WORLD_SIZE"),
        (SRUN | {"RANK": "0"}, "RANK=0 contradicts srun's SLURM_PROCID=2"),
        (SRUN | {"LOCAL_RANK": "1"}, "LOCAL_RANK=1 contradicts srun's SLURM_LOCALID=0"),
        (SRUN | TORCHRUN | {"GROUP_WORLD_SIZE": "1"}, "srun started 3 tasks and each its own torchrun of 1 machine,"),
        (
            MPIRUN | TORCHRUN | {"GROUP_WORLD_SIZE": "1"},
            "mpirun started 2 tasks and each its own torchrun of 1 machine,",
        ),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "has no LOCAL_RANK and no MASTER_ADDR and no MASTER_PORT"),
        (BY_HAND | {"RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4; ranks count from 0, so set RANK=0 to RANK=3"),
        (BY_HAND | {"WORLD_SIZE": "two"}, "WORLD_SIZE='two', which is not a number"),
        (HOROVODRUN, "MASTER_ADDR=h1 MASTER_PORT=29500 horovodrun"),
        (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "mpirun -x MASTER_ADDR=h1 -x MASTER_PORT=29500"),
    ],
)
def test_contradictions(env: dict[str, str], sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        launched_rank(env, outer_launcher(env) or "", "n1", 20000)
    assert sentence in str(raised.value)


LIGHTNING = {"NODE_RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "h1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("env", "is_refused"),
    [
        (LIGHTNING | {"WORLD_SIZE": "4"}, True),
        # Of the first machine, and of one whose processes Lightning is to start.
        (LIGHTNING | {"WORLD_SIZE": "4", "NODE_RANK": "0"}, True),
        ({"NODE_RANK": "1", "MASTER_ADDR": "h1"}, True),
        ({"NODE_RANK": "0", "LOCAL_RANK": "1"}, True),
        ({"NODE_RANK": "0"}, False),
        (BY_HAND | {"NODE_RANK": "1"}, False),
        (TORCHRUN | {"NODE_RANK": "1"}, False),
        (SRUN | {"NODE_RANK": "1"}, False),
    ],
)
def test_ranks_that_are_numbered_by_their_machine(env: dict[str, str], is_refused: bool) -> None:
    """As Lightning's launcher does: without RANK, each would train alone."""
    if is_refused:
        with refuses("ranks_are_numbered_by_machine", node=env["NODE_RANK"]):
            outer_launcher(env)
    else:
        assert outer_launcher(env) == outer_launcher({key: env[key] for key in env if key != "NODE_RANK"})


TWO_EACH = SRUN | {"SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
ONE_EACH = SRUN | {"SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
HALF = {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
OF_ONE = TORCHRUN | {"GROUP_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("env", "line", "after"),
    [
        (
            ONE_EACH | OF_ONE,
            "give torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500",
            ONE_EACH | TORCHRUN,
        ),
        (
            TWO_EACH | OF_ONE,
            "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 torchrun --nproc-per-node=2 --nnodes=2 --rdzv",
            ONE_EACH | TORCHRUN,
        ),
        (MPIRUN | OF_ONE, "mpirun -np 1 --map-by ppr:1:node torchrun --nproc-per-node=2, or", MPIRUN | HALF | OF_ONE),
    ],
)
def test_a_torchrun_in_each_task_and_the_line_that_starts_one_on_each_machine(
    env: dict[str, str], line: str, after: dict[str, str]
) -> None:
    with pytest.raises(UserError) as raised:
        outer_launcher(env)
    assert line in str(raised.value)
    assert outer_launcher(after) == "torchrun"  # as that line starts it


def test_once_on_each_machine_is_not_once_in_each_task() -> None:
    for nnodes in (None, 2, 4):
        with pytest.raises(UserError, match=r"--ntasks=2 --ntasks-per-node=1"):
            refuse_to_start_more(TWO_EACH, nnodes)
    with pytest.raises(UserError, match="machine, with --nnodes"):
        refuse_to_start_more(ONE_EACH, None)
    refuse_to_start_more(ONE_EACH, 2)  # as that line starts it
    assert (srun.node_rank(ONE_EACH, 2), srun.node_rank(TWO_EACH, 4)) == (1, None)
    with pytest.raises(UserError, match=r"without mpirun$"):
        refuse_to_start_more(MPIRUN, 2)


def test_torchrun_in_srun_on_as_many_machines_is_right() -> None:
    assert outer_launcher(SRUN | TORCHRUN | {"GROUP_WORLD_SIZE": "3"}) == "torchrun"


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_RANK", "HOROVOD_RANK"])
@pytest.mark.parametrize("nproc", [None, 2])
def test_half_of_a_launchers_variables_is_a_sentence_for_every_command(name: str, nproc: int | None) -> None:
    setup = Setup("digits", nproc=nproc)
    with pytest.raises(UserError, match="incomplete"):
        detect_launched_rank({name: "0"}, setup)
    with pytest.raises(UserError, match="incomplete"):
        refuse_under_launcher("verify", {name: "0"}, setup)
    assert detect_launched_rank({"HOME": "/"}, setup) is None
    refuse_under_launcher("verify", {"HOME": "/"}, setup)
