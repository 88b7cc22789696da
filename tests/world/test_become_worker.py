"""Which of the processes that a user's command starts are ranks, by the variables of every launcher."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from budget import budget
from samestep.commands.check import rank_variables
from samestep.world import become_worker

OF_TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
OF_MPIRUN = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
OF_HOROVODRUN = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}
SHELL = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}  # in a batch script
TASK = SHELL | {"SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("shell", "process", "rank"),
    [
        ({}, {}, ""),
        ({}, OF_TORCHRUN, "RANK"),
        ({}, {"RANK": "0"}, "RANK"),
        ({}, OF_TORCHRUN | {"WORLD_SIZE": "1"}, "RANK"),  # the wrong number, which the worker then names
        ({"RANK": "0"}, {"RANK": "0"}, ""),  # torchrun itself, in a shell that exports RANK
        ({"RANK": "0"}, OF_TORCHRUN, "RANK"),
        ({}, OF_HOROVODRUN, "HOROVOD_RANK"),
        ({}, OF_HOROVODRUN | {"HOROVOD_SIZE": "1"}, "HOROVOD_RANK"),  # the wrong number, too
        ({}, OF_MPIRUN, "OMPI_COMM_WORLD_RANK"),
        ({}, OF_MPIRUN | {"OMPI_COMM_WORLD_SIZE": "1"}, ""),  # a torchrun that mpirun has started
        ({}, OF_MPIRUN | OF_TORCHRUN, "RANK"),  # a rank of that torchrun
        (SHELL, SHELL, ""),
        (SHELL, TASK, "SLURM_PROCID"),
        (TASK, TASK, ""),  # a command that is itself a task
        (TASK, TASK | {"SLURM_STEP_ID": "1"}, "SLURM_PROCID"),
        (SHELL, TASK | {"SLURM_NTASKS": "1"}, ""),  # a torchrun that srun has started
        (SHELL, TASK | OF_MPIRUN, "OMPI_COMM_WORLD_RANK"),  # mpirun in a Slurm job starts its ranks with srun
    ],
)
def test_a_rank_is_recognised(shell: dict[str, str], process: dict[str, str], rank: str) -> None:
    launchers = {become_worker.LAUNCHERS: json.dumps(rank_variables(shell, nproc=2))}
    names = become_worker.rank_variables(process | launchers)
    assert names[:1] == ([rank] if rank else [])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.py", "--lr", "1"], ["train.py", "--lr", "1"]),
        (["-u", "-W", "ignore", "-X", "dev", "train.py"], ["train.py"]),
        (["-u", "-m", "package.train", "-c"], ["-m", "package.train", "-c"]),
        (["-m", "torch.distributed.run", "--nnodes", "2", "train.py"], []),  # it starts the ranks
        (["-m", "samestep", "run"], []),
        (["-c", "print()"], []),
        (["-"], []),
        ([], []),
    ],
)
def test_a_script_is_what_follows_the_options_of_python(arguments: list[str], words: list[str]) -> None:
    assert become_worker.script_of(arguments) == words


def test_the_copy_takes_no_name_from_the_script(tmp_path: Path) -> None:
    """A script's own module may have the name of one of the standard library's that Python has not imported itself."""
    (tmp_path / "python").mkdir()
    copy = tmp_path / "python" / "sitecustomize.py"
    copy.write_text(Path(become_worker.__file__).read_text())
    (tmp_path / "names.py").write_text("import sys\nprint(*sorted(sys.modules))")
    words = [sys.executable, str(tmp_path / "names.py")]
    plain = subprocess.run(words, capture_output=True, text=True, timeout=budget())
    for variables in (
        {become_worker.MONITOR: str(tmp_path)},
        {become_worker.PLAN: "none", become_worker.LAUNCHERS: "[]"},
    ):
        env = os.environ | variables | {"PYTHONPATH": str(copy.parent), become_worker.FOLDER: str(copy.parent)}
        watched = subprocess.run(words, env=env, capture_output=True, text=True, timeout=budget())
        assert {*watched.stdout.split()} - {*plain.stdout.split()} <= {"sitecustomize", "__future__"}, watched.stderr


def test_the_copy_runs_where_samestep_is_not_installed() -> None:
    tree = ast.parse(Path(become_worker.__file__).read_text())
    imported = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert {str(name).partition(".")[0] for name in imported} <= sys.stdlib_module_names
