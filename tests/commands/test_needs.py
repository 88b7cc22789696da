"""A proof that does not fit into the machine is refused before it starts; one that is tight says so and goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from samestep.commands.needs import OF_RANK, OF_REFERENCE, Need, Room, check_needs, need_of
from samestep.engine import Layout, Numerics
from samestep.errors import UserError
from samestep.records.inspection import EngineFacts

NEED = Need(memory=10e9, memory_at_once=12e9, disk=5e9, seconds=754)
PLENTIFUL = Room(memory=64e9, free_memory=32e9, free_disk=100e9)


def test_a_proof_that_fits_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    check_needs(NEED, PLENTIFUL, "cpu")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("room", "sentence"),
    [
        (Room(8e9, 6e9, 100e9), "this machine has 8.0 GB of memory; give fewer ranks"),
        (Room(64e9, 32e9, 4e9), "the results' folder has 4.0 GB free; give fewer ranks"),
    ],
)
def test_a_proof_that_cannot_fit_is_refused(room: Room, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        check_needs(NEED, room, "cpu")
    assert "about 10.0 GB" in str(error.value)
    assert sentence in str(error.value)


def test_a_tight_proof_says_so_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    check_needs(NEED, Room(64e9, 6e9, 100e9), "cpu")
    assert "about 10.0 GB" in capsys.readouterr().err


def test_a_gpus_memory_is_not_the_machines() -> None:
    check_needs(NEED, Room(8e9, 6e9, 100e9), "cuda:0")


@pytest.mark.parametrize(
    ("processes", "nnodes", "of_a_parameter"),
    [(1, 1, OF_REFERENCE), (2, 1, 2 * OF_RANK), (4, 1, 4 * OF_RANK), (4, 2, 2 * OF_RANK), (2, 2, OF_REFERENCE)],
)
def test_the_memory_is_that_of_the_reference_or_of_one_machines_ranks(
    processes: int, nnodes: int, of_a_parameter: float
) -> None:
    """Of a model so large that nothing else counts."""
    job = SimpleNamespace(
        data=SimpleNamespace(global_batch=8, micro_batches={}),
        model=SimpleNamespace(parameters=10**12, row_bytes=0.0, row_s=0.0),
        proof=SimpleNamespace(rows=0, steps=8, costly=False),
    )
    study: Any = SimpleNamespace(job=job, size=processes)
    study.machines = SimpleNamespace(nnodes=nnodes)
    study.setup = SimpleNamespace(quick=False)
    facts = EngineFacts("ddp", True, processes=processes, layout=Layout(processes), numerics=Numerics())
    row: Any = SimpleNamespace(launcher="fork", facts=facts, continued_by=None)
    assert need_of(study, [row]).memory == pytest.approx(of_a_parameter * 10**12, rel=1e-3)
    assert need_of(study, [row, row]).disk > need_of(study, [row]).disk
