"""samestep verify proves a second number of ranks: which one, as what, and what its verdict says of the row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from budget import budget, deadline
from command import DIGITS, TESTS, samestep
from lane_marks import CHECK, FULL
from mutations.faults.fault import Fault
from mutations.faults.fifth_rank import FAULTS, of_ranks_above
from mutations.plant import patched
from ranks import engine_facts
from samestep.commands import compare, engine_rows
from samestep.commands.command_options import VerifyOptions
from samestep.commands.engine_rows import Row, SecondRow, result_of, with_second
from samestep.commands.exit_codes import exit_code
from samestep.engine import Layout, Numerics
from samestep.errors import UserError
from samestep.launch.fork_client import SOCKETS
from samestep.message import as_said, message
from samestep.proof.plan import second_steps
from samestep.records.inspection import EngineFacts, Question, SecondSize
from samestep.records.plan import second_size
from samestep.records.results import Divergence, Verdict
from samestep.report.verdicts import left_out, proven_second
from samestep.tasks.inspect.engines import demands_of
from samestep.tasks.inspect.job import inspect_job
from samestep.world.mesh import Mesh, parse_mesh

TWO = EngineFacts("ddp", available=True, process_kind="group", processes=2)
FIVE = replace(TWO, processes=5)
DIVERGENCE = Divergence("sgd", 0, "loss", tensor=None, rank=4, expected=1.0, found=2.0, ranks=5)
DIVISIBLE = f"{TESTS}/conformance/jobs_divided.py:job"
THIRD_TENSOR_RANK = Fault(
    "a part's gradient lost",
    "engines/tensor.py",
    "            loss.backward()\n",
    "            (loss if world.rank <= LAST else loss * 0).backward()\n",
    ("first gradient",),
    "",
)
AVERAGED = next(fault for fault in FAULTS if fault.name == "gradients averaged over so many ranks at most")


@pytest.mark.parametrize(
    ("ranks", "global_batch", "second"),
    [(2, 128, 5), (3, 128, 5), (1, 8, 5), (5, 128, 3), (10, 128, 3), (15, 128, 7), (2, 4, 3), (2, 2, 0), (64, 64, 5)],
)
def test_the_second_number_shows_what_the_first_one_hides(ranks: int, global_batch: int, second: int) -> None:
    assert second_size(ranks, global_batch) == second


@pytest.mark.parametrize(
    ("costly", "proof_steps", "phases", "steps"),
    [(False, 8, {}, 4), (True, 4, {}, 2), (True, 8, {"d": "", "g": ""}, 4)],
)
def test_of_a_costly_step_it_takes_half_as_many(
    costly: bool, proof_steps: int, phases: dict[str, str], steps: int
) -> None:
    proof = SimpleNamespace(costly=costly, steps=proof_steps)
    job: Any = SimpleNamespace(proof=proof, optimizer=SimpleNamespace(phases=phases))
    assert second_steps(job) == steps


@pytest.mark.parametrize(
    ("given", "also"),
    [
        ({}, None),
        ({"also": 8}, 8),
        ({"also": 6, "mesh": "data=2,tensor=2"}, 6),
        ({"also": "none"}, 0),
        ({"quick": True}, 0),
        ({"quick": True, "also": 5}, 5),
        ({"resume": True}, 0),
        ({"ranks_as": "threads", "nproc": 3}, None),
    ],
)
def test_what_the_options_ask_for(given: dict[str, Any], also: int | None) -> None:
    assert VerifyOptions(**given).setup("digits").also == also


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"also": "non"}, "option_has_no_such_value"),
        ({"also": 0}, "rank_number_too_small"),
        ({"also": 10**6}, "rank_number_too_large"),
        ({"also": 3, "nproc": 3}, "option_has_no_such_value"),
        ({"also": 3, "resume": True}, "second_size_does_not_go_with"),
        ({"also": 5, "mesh": "data=2,tensor=2"}, "option_has_no_such_value"),
    ],
)
def test_a_wrong_number_is_one_sentence(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as raised:
        VerifyOptions(**given).setup("digits")
    assert raised.value.message.id == said and "--also" in str(raised.value)


@pytest.mark.parametrize(
    ("found", "word", "code"),
    [
        (Verdict("same", bitwise=True), "same", 0),
        (Verdict("differs", first_divergence=DIVERGENCE), "differs", 1),
        (Verdict("failed", reason=as_said("rank 4 was killed")), "failed", 1),
        (Verdict("refused", reason=as_said("a rank has one row")), "same", 0),
    ],
)
def test_the_row_says_what_the_second_number_of_ranks_has_shown(found: Verdict, word: str, code: int) -> None:
    row = Row("fork", replace(TWO), Verdict("same", bitwise=True))
    row.second = SecondRow("threads", FIVE, verdict=found)
    row.verdict = with_second(row)
    result = result_of(row)
    assert (result.verdict, result.second and result.second.verdict) == (word, found.verdict)
    assert (proven_second(result) is not None) == (found.verdict == "same")
    said = [*result.notes, *([result.reason] if result.reason else [])]
    expected = {"failed": "on_second_number_of_ranks", "refused": "not_proven_on_second_number_of_ranks"}
    assert [note.id for note in said] == [name for verdict, name in expected.items() if verdict == found.verdict]
    results: Any = SimpleNamespace(engines=[result], same_as_one_process=None)
    assert exit_code(results) == code


@pytest.mark.parametrize(
    ("devices", "no_threads", "launcher"),
    [
        (("cpu",), None, "threads"),
        (("cpu",), as_said("its library"), "torchrun"),
        (("cuda:0",), None, "threads"),
        (("cuda:0",), as_said("its library"), None),
        (tuple(f"cuda:{number}" for number in range(5)), None, "torchrun"),
    ],
)
def test_where_each_rank_has_a_gpu_they_are_processes(
    devices: tuple[str, ...], no_threads: Any, launcher: str | None
) -> None:
    facts = replace(FIVE, devices=devices, no_threads=no_threads, layout=Layout(replicas=5))
    second = SimpleNamespace(ranks=5, varying_calls={}, refused=None)
    job: Any = SimpleNamespace(proof=SimpleNamespace(second_of=lambda _: second))
    row = Row("torchrun", replace(TWO, layout=Layout(replicas=2)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_rows, "refusal", lambda *_: None)
        patch.setattr(engine_rows, "replace", lambda job, **_: job)
        inspected: Any = SimpleNamespace(job=job, inspection=SimpleNamespace(second_engines=[facts]))
        engine_rows._add_second_size(inspected, row)
    assert row.second
    refused = row.second.verdict.reason.id if row.second.verdict and row.second.verdict.reason else None
    assert (None if refused else row.second.launcher, refused) == (launcher, None if launcher else "too_few_gpus")


@pytest.mark.parametrize(
    ("devices", "found", "told", "launches"),
    [
        (("cpu",), "differs", "same", ["threads", "fork"]),
        (("cuda:0",), "same", "same", ["threads"]),
        (("cuda:0",), "differs", "refused", ["threads"]),
        (("cuda:0",), "failed", "refused", ["threads"]),
    ],
)
def test_threads_accuse_nobody_alone(
    devices: tuple[str, ...], found: str, told: str, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What differs as threads is confirmed by processes; where there are too few GPUs for these, a note says so."""
    row = Row("fork", replace(TWO, numerics=Numerics()), Verdict("same"))
    row.second = SecondRow("threads", replace(FIVE, devices=devices))
    launched = []

    def judged(launches: Any, row: Row, *_: Any) -> Verdict:
        assert row.second
        launched.append(row.second.launcher)
        return Verdict(found if row.second.launcher == "threads" else "same")  # type: ignore[arg-type]

    monkeypatch.setattr(compare, "_second_verdict", judged)
    setup = SimpleNamespace(as_threads=False)
    arguments: Any = (SimpleNamespace(inspected=SimpleNamespace(setup=setup)), row, None)
    compare._launch_second(*arguments)
    assert row.second.verdict and (row.second.verdict.verdict, launched) == (told, launches)
    assert row.verdict and row.verdict.verdict == "same"
    assert [note.id for note in row.verdict.notes] == ["not_proven_on_second_number_of_ranks"] * (told == "refused")


def verified(source: Path | None, *line: str, out: Path) -> Any:
    """The row of one engine, of the real command with this package."""
    command = [sys.executable, "-m", "samestep", "verify", *line, *deadline(), "--json", "--out", str(out)]
    # Not the tests' fork servers, which have imported the package as it is.
    environment = {name: value for name, value in os.environ.items() if name != SOCKETS}
    environment |= {"PYTHONPATH": str(source)} if source else {}
    done = subprocess.run(command, capture_output=True, text=True, timeout=budget(150), env=environment, cwd=out.parent)
    (row,) = json.loads(done.stdout)["engines"]
    return done.returncode, row


@pytest.mark.parametrize(
    ("above", "code", "verdict", "ranks_as"),
    [
        pytest.param(3, 1, "differs", "processes", marks=CHECK),  # what threads show is confirmed by processes
        pytest.param(99, 0, "same", "threads", marks=FULL),
    ],
)
def test_a_fault_of_the_fifth_rank_is_seen_by_a_proof_of_two(
    above: int, code: int, verdict: str, ranks_as: str, tmp_path: Path
) -> None:
    source = patched(of_ranks_above(above, AVERAGED), tmp_path / "package")
    found, row = verified(source, *DIGITS, "--engine", "ddp", "--nproc", "2", out=tmp_path / "out")
    assert (found, row["verdict"]) == (code, verdict), row
    assert (row["second"]["ranks"], row["second"]["verdict"], row["second"]["ranks_as"]) == (5, verdict, ranks_as)
    if code:
        divergence = row["first_divergence"]
        assert (divergence["ranks"], divergence["quantity"]) == (5, "first gradient")


def second_mesh(engine: str, mesh: str = "", also: int | None = None, **settings: str) -> SecondSize | None:
    """The second mesh of an engine, on two ranks or those of `mesh`."""
    given = parse_mesh(mesh)
    row = engine_facts(engine, given.size if given else 2, mesh=mesh)
    question = Question(DIVISIBLE, settings, steps=8, also=also, proves=True, mesh=row.mesh)
    return inspect_job(question, row.processes, "cpu", demands_of([row], question, "cpu")).proof.second_of(row)


@pytest.mark.parametrize(
    ("engine", "mesh", "also", "found", "refused"),
    [
        ("tensor", "", None, "tensor=4", None),  # heads and hidden layers do not divide by 3
        ("expert", "", None, "expert=4", None),
        ("context", "", None, "sequence=3", None),
        ("fsdp", "data=2,shard=2", None, "data=2,shard=3", None),
        ("tensor", "data=2,tensor=2", 6, "data=3,tensor=2", None),
        ("tensor", "tensor=2", 7, "tensor=7", "layer_does_not_divide"),
    ],
)
def test_a_second_mesh_is_one_that_divides_the_model(
    engine: str, mesh: str, also: int | None, found: str, refused: str | None
) -> None:
    second = second_mesh(engine, mesh, also)
    assert second and str(second.mesh) == found and second.mesh and second.ranks == second.mesh.size
    assert (second.refused and second.refused.id) == refused


def test_what_no_second_mesh_divides_is_said_in_the_last_lines() -> None:
    why = message("plan_cannot_be_tried", engine="tensor", error="it does not divide")
    two = replace(TWO, name="tensor", mesh=Mesh(tensor=2), layout=Layout(1))
    row = Row("fork", two, Verdict("same"))
    row.second = SecondRow(
        "threads", replace(two, processes=3, mesh=Mesh(tensor=3)), verdict=Verdict("refused", reason=why)
    )
    row.verdict = with_second(row)
    proven = replace(result_of(row), second=replace(result_of(row).second, verdict="same"))  # type: ignore[type-var]
    for result, said, quick in (
        (result_of(row), "second_size_not_compared", False),
        (proven, "second_size_compared", False),
        (replace(proven, second=None), "one_number_of_ranks_compared", False),
    ):
        results: Any = SimpleNamespace(
            engines=[result],
            proof=SimpleNamespace(second_steps=4, quick=quick, rows_looked_at=0),
            rows=0,
            world_size=2,
            measured=False,
        )
        (found,) = left_out(results)
        assert found.id == said and result.ranks == 2
        assert said.startswith("one_") or (found.fields["ranks"], found.fields["mesh"]) == (3, "tensor=3")


@pytest.mark.parametrize(
    ("above", "code", "verdict"),
    [pytest.param(1, 1, "differs", marks=FULL), pytest.param(99, 0, "same", marks=FULL)],
)
def test_a_fault_of_the_third_tensor_rank_is_seen_by_a_proof_of_two(
    above: int, code: int, verdict: str, tmp_path: Path
) -> None:
    source = patched(of_ranks_above(above, THIRD_TENSOR_RANK), tmp_path / "package")
    found, row = verified(source, DIVISIBLE, "--engine", "tensor", "--nproc", "2", out=tmp_path / "out")
    assert (found, row["verdict"]) == (code, verdict), row
    assert (row["second"]["mesh"], row["second"]["verdict"]) == ("tensor=4", verdict)


@pytest.mark.check
def test_a_job_that_five_ranks_cannot_train_is_proven_on_two(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(FIVE_ROWS)
    done = samestep(
        "verify", str(job), "--engine", "ddp", "--nproc", "2", "--also", "5", "--json", out=tmp_path / "out"
    )
    (row,) = json.loads(done.stdout)["engines"]
    assert (done.returncode, row["verdict"], row["second"]["verdict"]) == (0, "same", "refused"), row
    assert "not_proven_on_second_number_of_ranks" in json.dumps(row["notes"])


FIVE_ROWS = """
import torch
from torch import nn
from samestep import Job, Recipe


def job():
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    rows = torch.utils.data.TensorDataset(inputs, torch.arange(40) % 2)
    return Job(
        model=model,
        criterion=lambda output, batch: nn.functional.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.1}),
        train=rows,
        global_batch=8,
    )
"""
