"""The judge of ranks that share out one model, on records that are made up: it needs no torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from samestep.judge import judge
from samestep.judge.layout import Layout, TensorLayout
from samestep.judge.replicas import of_one_replica
from samestep.message import message
from samestep.records.divided_models import MeshRecord, PieceRecord
from samestep.records.findings import CheckResults, Finding, Question
from samestep.records.record import Record
from samestep.records.results import Divergence
from samestep.records.script import LossRecord, MicroBatchRecord, RandomRecord, ScriptRecord, StepRecord
from samestep.records.script_plan import ScriptPlan
from samestep.records.tensor_files import write_arrays

RANKS, STEPS, SIZE = 4, 3, 12
MESH = MeshRecord(["dp", "tp"], [2, 2], [0, 1, 2, 3])
# FSDP cuts `up` along dp what is cut along tp already; `norm` is whole along tp, `bias` is no DTensor.
PLACES = {0: (0, 3), 1: (6, 9), 2: (3, 6), 3: (9, 12)}


def piece(rank: int) -> PieceRecord:
    begin, end = PLACES[rank]
    return PieceRecord(0, ["shard", "shard"], [begin], [end - begin], data=1)


def among_zeros(array: np.ndarray, begin: int, end: int) -> np.ndarray:
    zeros = np.zeros_like(array)
    zeros[begin:end] = array[begin:end]
    return zeros


def judged(folder: Path, kind: str = "") -> CheckResults:
    """Judges two replicas of two ranks each. kind: of the fault."""
    random, steps = np.random.default_rng(0), [list[StepRecord]() for _ in range(RANKS)]
    for step in range(STEPS):
        own = [{name: random.normal(size=SIZE) for name in ("up", "norm", "bias")} for _ in range(2)]
        for rank in range(RANKS):
            replica, place = divmod(rank, 2)
            mean = {name: (own[0][name] + own[1][name]) / 2 for name in own[0]}
            factor = 0.5 + rank / 10 if kind == "local norms" else 1.0
            if kind == "added up":
                mean["bias"] = 2 * mean["bias"]
            if kind == "own sequence" and place:
                mean["norm"] = mean["norm"] / 3
            tensor = (0, 6) if place == 0 else (6, 12)
            arrays = {
                "taken up": among_zeros(factor * mean["up"], *PLACES[rank]),
                "taken norm": factor * mean["norm"],
                "taken bias": factor * mean["bias"],
                "local 0 up": among_zeros(own[replica]["up"], *tensor),
                # Each rank has the gradient of its half of the sequence, which is added up along tp.
                "local 0 norm": among_zeros(own[replica]["norm"], *tensor),
                "local 0 bias": own[replica]["bias"],
            }
            write_arrays(folder / f"rank{rank}.step{step}.npz", arrays)
            reader = {"rows": rank, "same rows": 0}.get(kind, replica)
            rows = [f"{reader} {step} {row}" for row in range(3)]
            batches = [MicroBatchRecord(rows, [LossRecord(1.0, "mean", 3)], [])]
            apart = rank if kind in ("drifts", "own sequence") else 0
            digests = {"up": 10 * step + rank, "norm": step + 100 * apart, "bias": step}
            steps[rank].append(StepRecord(0, batches, [0.1], [step], [], 0, None, digests, [*digests], ["float32"]))
    ranks = []
    for rank in range(RANKS):
        pieces = {"up": piece(rank), "taken up": piece(rank)}
        pieces["local up"] = PieceRecord(1, ["shard"], [0 if rank % 2 == 0 else 6], [6])
        start = {"up": rank, "norm": rank % 2 if kind == "begins apart" else 1, "bias": 1}
        meshes = [MESH, MeshRecord(["tp"], [2], [0, 1] if rank < 2 else [2, 3])]
        states = [str(rank if kind == "own sequence draws" else rank // 2)] * STEPS
        record = ScriptRecord(
            rank,
            RANKS,
            start,
            steps[rank],
            [],
            "steps",
            [],
            0.1,
            [0.1] * STEPS,
            randoms=RandomRecord(draws=states),
            meshes=meshes,
            pieces=pieces,
        )
        ranks.append(record)
    return judge(ScriptPlan(str(folder), 0.0, "train.py", (), STEPS), ranks, Record(folder))


def finding_of(results: CheckResults, question: Question) -> Finding:
    return next(finding for finding in results.findings if finding.question == question)


def test_replicas_are_told_apart_and_right(tmp_path: Path) -> None:
    results = judged(tmp_path)
    assert {finding.answer for finding in results.findings} <= {"right", "unknown"}, results.findings
    # Only one process tells whether pieces are the whole.
    assert results.missing == ["replayed gradient"]
    layout = results.notes[0]
    assert layout.id == "layout_of_ranks"
    assert layout.fields == {"replicas": ["0+1", "2+3"], "tensor": "tp", "data": "dp"}
    assert finding_of(results, "rows").message.id == "replica_reads_one_batch"


@pytest.mark.parametrize(
    ("kind", "question", "identity", "axis", "step"),
    [
        ("rows", "rows", "replica_reads_other_rows", "tp", 0),
        ("same rows", "rows", "replicas_train_the_same_rows", "dp", 0),
        ("begins apart", "initial weights", "replica_begins_apart", "tp", None),
        ("own sequence", "gradient", "replica_gradient_apart", "tp", 0),
        ("drifts", "weights", "replica_drifts_apart", "tp", 0),
        ("local norms", "gradient", "clipped_by_local_norms", "tp", 0),
        ("added up", "gradient", "whole_gradients_added_up", "tp", 0),
    ],
)
def test_a_fault_is_named_with_its_axis(
    tmp_path: Path, kind: str, question: Question, identity: str, axis: str, step: int | None
) -> None:
    results = judged(tmp_path, kind)
    finding = finding_of(results, question)
    assert finding.message.id == identity, finding
    assert axis in str(finding.message.fields.get("axis"))
    assert finding.divergence and finding.divergence.step == step
    assert results.answer == "differs"


def test_a_replay_that_was_told_of_all_ranks_is_no_proof() -> None:
    one, two = TensorLayout([[0, 1]], ["tp"], []), TensorLayout([[0, 1], [2, 3]], ["tp"], ["dp"])
    right = Finding("replayed rate", "right", message("rates_are_of_one_process"))
    assert of_one_replica(right, one, 1) == right == of_one_replica(right, two, 2)
    assert of_one_replica(right, one, 2).answer == "unknown"
    cause = message("loss_depends_on_ranks")
    divergence = Divergence("script", 0, "gradient", "up", 0, 1.0, 2.0, cause=cause)
    wrong = Finding("replayed gradient", "differs", cause, divergence)
    assert of_one_replica(wrong, two, 1).message.id == "replica_is_no_one_process"
    assert of_one_replica(wrong, TensorLayout([[0], [1]], [], ["shard"]), 1) == wrong


def test_layers_that_are_divided_by_hand_are_no_broken_data_parallelism() -> None:
    def ranks(reduces: bool, *readers: str) -> list[ScriptRecord]:
        return [
            ScriptRecord(
                rank, 2, {"up": rank}, [_step(reader)], [], "steps", [], 0.1, [0.1], reduces_in_forward=reduces
            )
            for rank, reader in enumerate(readers)
        ]

    layout = Layout.of(ranks(True, "a", "a"))
    assert (layout.kind, layout.pieces) == ("by hand", [0, 1])
    assert Layout.of(ranks(False, "a", "a")).kind == Layout.of(ranks(True, "a", "b")).kind == "replicas"


def _step(row: str) -> StepRecord:
    return StepRecord(0, [MicroBatchRecord([row])], [0.1], [], [], 0, None, {}, [])
