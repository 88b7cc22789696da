"""results.json is a record: what is written is read again, and a file of another schema is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from samestep.errors import UserError
from samestep.message import as_said
from samestep.records.files import OLDEST, SCHEMA
from samestep.records.inspection import MachineFacts
from samestep.records.results import (
    CompareResults,
    Divergence,
    EngineResult,
    Launch,
    Proof,
    StepTime,
    Summary,
    read_results,
    write_results,
)
from samestep.records.run_results import EvaluateResults

FIGURES = Summary(2.0, 1.0, 3.0, 5)
PROVEN = EngineResult(
    "same", engine="ddp", launcher="torchrun", settings={"bucket_mb": 1}, replicas=2, notes=(as_said("a"),)
)
MEASURED = replace(
    PROVEN,
    samples_per_second=FIGURES,
    ratio=FIGURES,
    efficiency=FIGURES,
    step_ms=StepTime(0.1, 4.0),
    peak_memory_mib=9.0,
    startup_s=1.0,
    launches=[Launch(0, 2.0, [4.0], [0.1], [float("inf")])],
)
DIFFERS = EngineResult("differs", first_divergence=Divergence("sgd", 3, "loss", None, 1, 0.5, "NaN"), engine="fsdp")
PROOF = CompareResults(
    samestep="1",
    package="",
    job="digits",
    settings={},
    world_size=2,
    global_batch=8,
    rows=9,
    device="cpu",
    machine=MachineFacts("3.11", "2.13", "h1", "x86_64", 2),
    threads_per_rank=1,
    workers=0,
    dtype="float32",
    started="2026",
    proof=Proof(8, "float64"),
    engines=[PROVEN, DIFFERS],
)
COMPARED = replace(PROOF, engines=[MEASURED], repeats=1, warmup_steps=2, measured_steps=3)
SCORE = EvaluateResults("digits", {}, "fork", 2, "w.safetensors", "ab", {"loss": 0.5}, 4, None)


@pytest.mark.parametrize("results", [PROOF, COMPARED, SCORE], ids=["verify", "compare", "evaluate"])
def test_results_are_read_as_they_were_written(results: CompareResults | EvaluateResults, tmp_path: Path) -> None:
    write_results(results, tmp_path)
    assert next(iter(json.loads((tmp_path / "results.json").read_text()).items())) == ("schema", SCHEMA)
    assert read_results(type(results), tmp_path) == results


@pytest.mark.parametrize(("schema", "age"), [(OLDEST - 1, "an older"), (SCHEMA + 1, "a newer")])
def test_results_of_another_samestep_are_refused(schema: int, age: str, tmp_path: Path) -> None:
    write_results(PROOF, tmp_path)
    path = tmp_path / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": schema}))
    with pytest.raises(UserError, match=f"{path} was written by {age} samestep \\(schema {schema}"):
        read_results(CompareResults, tmp_path)
