"""--mesh has one spelling for every command, and travels with the plan; its replicas are what the judge compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from samestep.commands.command_options import (
    CompareOptions,
    EvaluateOptions,
    RunOptions,
    SlurmOptions,
    VerifyOptions,
)
from samestep.commands.machine_options import MachineOptions
from samestep.commands.options import arguments
from samestep.commands.submit import kubernetes, slurm_script
from samestep.errors import UserError
from samestep.proof.trace import Trace, TracedMicroBatch, replicas_of
from samestep.world.mesh import Mesh

FOUR = Mesh(data=2, tensor=2)
GIVEN = ("data=2,tensor=2", "tensor=2, data=2", {"data": 2, "tensor": 2})


@pytest.mark.parametrize("mesh", GIVEN, ids=str)
def test_every_command_takes_it(mesh: str | Mapping[str, int]) -> None:
    for kind in (VerifyOptions, CompareOptions, RunOptions):
        assert kind(nproc=4, mesh=mesh).setup("digits").mesh == FOUR
    assert EvaluateOptions(weights="w", nproc=4, mesh=mesh).setup("digits").mesh == Mesh(data=4)
    assert SlurmOptions(mesh=mesh).setup("digits").nproc == 4
    assert SlurmOptions(mesh=mesh, nodes=2).setup("digits").nproc == 2


@pytest.mark.parametrize("mesh", GIVEN[::2], ids=str)
def test_it_is_a_word_of_the_lines_that_are_written(mesh: str | Mapping[str, int]) -> None:
    given = RunOptions(engine="tensor", nproc=4, mesh=mesh)
    words = arguments(given, RunOptions)
    assert words[words.index("--mesh") + 1] == "data=2,tensor=2"
    assert "--mesh data=2,tensor=2" in slurm_script(SlurmOptions(engine="tensor", mesh=mesh))[1]
    shown = kubernetes(given.setup("digits"), given, "k8s", "registry/x:1", "")
    assert "--mesh data=2,tensor=2" in shown or '"data=2,tensor=2"' in shown


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (RunOptions(nproc=3, mesh="data=2,tensor=2"), "mesh_of_other_ranks"),
        (VerifyOptions(nproc=4, mesh="tensor=2"), "mesh_of_other_ranks"),
        (EvaluateOptions(weights="w", nproc=3, mesh="tensor=2"), "mesh_of_other_ranks"),
        (SlurmOptions(nodes=3, mesh="tensor=2"), "mesh_of_other_ranks"),
        (RunOptions(mesh="tensor:2"), "mesh_is_malformed"),
        (RunOptions(mesh="tp=2"), "mesh_has_no_such_axis"),
        (RunOptions(mesh="data=2", machines=MachineOptions(nnodes="1:2")), "mesh_of_leaving_machines"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(options: RunOptions, said: str) -> None:
    with pytest.raises(UserError) as raised:
        options.setup("digits")
    assert raised.value.message.id == said


def test_two_machines_multiply() -> None:
    machines = MachineOptions(nnodes=2, master_addr="h1")
    assert RunOptions(nproc=2, mesh="data=2,tensor=2", machines=machines).setup("digits").mesh == FOUR


def _micro_batch(indices: list[int]) -> TracedMicroBatch:
    return TracedMicroBatch(0, 0, 0, indices, [], float(len(indices)), 1.0)


def test_each_rank_is_compared_with_its_replica_and_no_row_counts_twice() -> None:
    assert [replicas_of(rank, 4, 2, FOUR) for rank in range(4)] == [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]
    assert replicas_of(0, 1, 4) == slice(0, 4)  # one process that holds several replicas
    assert [replicas_of(rank, 2, 2) for rank in range(2)] == [slice(0, 1), slice(1, 2)]
    rows = [[0, 1], [0, 1], [2, 3], [2, 3]]
    trace = Trace([[_micro_batch(of_rank)] for of_rank in rows], [None] * 4, [], {}, [], FOUR)
    assert trace.rows(0) == [0, 1, 2, 3]
    assert replace(trace, mesh=None).rows(0) == [0, 1, 0, 1, 2, 3, 2, 3]
