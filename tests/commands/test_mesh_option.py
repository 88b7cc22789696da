"""--mesh has one spelling for every command, and travels with the plan; its replicas are what the judge compares."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from samestep.commands import inspected_setup
from samestep.commands.command_options import (
    CompareOptions,
    EvaluateOptions,
    RunOptions,
    SlurmOptions,
    VerifyOptions,
)
from samestep.commands.engine_rows import rows_of
from samestep.commands.inspected_setup import InspectedSetup, inspect_setup
from samestep.commands.machine_options import MachineOptions
from samestep.commands.options import arguments
from samestep.commands.run import check_can_skip
from samestep.commands.setup import Setup
from samestep.commands.submit import kubernetes, slurm_script
from samestep.engine import Layout
from samestep.errors import Refused, UserError
from samestep.launch import Machines
from samestep.message import Message, message
from samestep.proof.trace import Trace, TracedMicroBatch, replicas_of
from samestep.records.inspection import (
    EngineFacts,
    Inspection,
    MachineFacts,
    OptimizerFacts,
    ProofFacts,
    Question,
    Refusals,
)
from samestep.world.mesh import Mesh

FOUR = Mesh(data=2, tensor=2)
# What rows_of asks of a job that every engine takes.
PLAIN: Any = SimpleNamespace(
    sync_batchnorm=False,
    gather_outputs=False,
    data=SimpleNamespace(global_batch=8, last="keep"),
    model=SimpleNamespace(unused=(), scalars=(), batch_layers=()),
    optimizer=OptimizerFacts("SGD"),
    proof=ProofFacts(8, 0, costly=False),
    refusals=Refusals({1: None, 2: None}),
)
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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (VerifyOptions(mesh="data=999999,tensor=999999"), "rank_number_too_large"),
        (RunOptions(mesh="data=999999"), "rank_number_too_large"),
        (EvaluateOptions(weights="w", mesh="data=999999"), "rank_number_too_large"),
        (SlurmOptions(mesh="data=999999"), "rank_number_too_large"),
        (VerifyOptions(mesh="data=33,tensor=2", ranks_as="threads"), "too_many_ranks_as_threads"),
        (VerifyOptions(mesh="data=2,tensor=2", ranks_as="threads"), "asked"),
    ],
)
def test_the_ranks_of_a_mesh_have_the_limits_of_nproc(
    options: RunOptions, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(question: Question, *_: object) -> None:
        raise UserError(message("asked", ranks=question.replicas))

    monkeypatch.setattr(inspected_setup, "ask", ask)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with pytest.raises(UserError) as raised:
        inspect_setup(options.setup("digits"))
    assert raised.value.message.id == said


@pytest.mark.parametrize(
    ("engine", "mesh", "rounds", "said"),
    [
        ("single", Mesh(tensor=2), 0, "engine_does_not_take_axis"),
        ("dataparallel", Mesh(data=2), 0, "engine_does_not_take_axis"),
        ("single", Mesh(), 0, None),
        ("single", Mesh(data=2), 5, None),  # the baseline of compare
    ],
)
def test_an_engine_of_one_process_takes_no_mesh_of_several_ranks(
    engine: str, mesh: Mesh, rounds: int, said: str | None
) -> None:
    facts = EngineFacts(engine, available=True, process_kind="one", devices=("cpu",), layout=Layout(1))
    inspection = Inspection(("cpu",), MachineFacts("", "", "", "", 2), 1, (facts,), PLAIN)
    setup = Setup(engines=(engine,), mesh=mesh, rounds=rounds)
    row = rows_of(InspectedSetup(setup, 1, Machines(), inspection))[0]
    reason = row.verdict.reason if row.verdict else None
    assert (reason.id if isinstance(reason, Message) else None) == said


@pytest.mark.parametrize(
    ("facts", "job", "said"),
    [
        ({"cannot_skip": message("pipeline_cannot_skip_steps")}, {}, "engine_cannot_skip_steps"),
        ({}, {"needs_closure": True}, "optimizer_cannot_skip_steps"),
        ({}, {"carry_state": True}, "carried_state_cannot_skip_steps"),
        ({}, {}, None),
    ],
)
def test_a_step_that_cannot_be_left_out_is_refused_before_the_start(
    facts: Mapping[str, Message], job: Mapping[str, bool], said: str | None
) -> None:
    optimizer = OptimizerFacts("LBFGS", needs_closure=job.get("needs_closure", False))
    asked: Any = SimpleNamespace(optimizer=optimizer, carry_state=job.get("carry_state", False))
    engine = EngineFacts("pipeline", available=True, **facts)  # type: ignore[arg-type]
    with pytest.raises(Refused) if said else nullcontext() as raised:
        check_can_skip(engine, asked)
    assert not said or (raised and raised.value.message.id == said)
