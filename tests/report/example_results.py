"""The results of a comparison in which each verdict occurs, and helpers that change a part of them."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

from samestep.message import as_said, message
from samestep.records.inspection import MachineFacts
from samestep.records.results import (
    CompareResults,
    Divergence,
    EngineResult,
    Launch,
    Measurement,
    OneProcess,
    Proof,
    SecondProof,
    StepTime,
    Summary,
)


def summary(median: float) -> Summary:
    return Summary(median, low=median * 0.97, high=median * 1.02, n=5)


def launch(repeat: int, step_ms: float, seed: int = 0, wrong: float = 0.0) -> Launch:
    """60 steps around `step_ms`, a slow one now and then, and a loss that falls; `seed` draws other noise on it."""
    random = Random(f"{repeat} {step_ms}")
    times = [
        step_ms * random.lognormvariate(0.02 * repeat - 0.04, 0.04) * random.choice([1] * 40 + [2.2]) for _ in range(60)
    ]
    noise = Random(seed)
    losses = [2.1 * math.exp(-i / 25) + 0.25 + 0.08 * noise.gauss(0, 1) + wrong * min(i, 30) / 30 for i in range(60)]
    return Launch(repeat, samples_per_second=64e3 / step_ms, step_ms=times, wait_ms=[0.12] * 60, losses=losses)


def row(engine: str, launcher: str, verdict: str, replicas: int = 2, **rest: Any) -> EngineResult:
    """A row without a measurement."""
    return EngineResult(verdict, engine=engine, launcher=launcher, replicas=replicas, **rest)


def measured(
    engine: str,
    launcher: str,
    verdict: str,
    step_ms: float,
    seed: int = 0,
    wrong: float = 0.0,
    replicas: int = 2,
    **rest: Any,
) -> EngineResult:
    """A row with five launches; one process takes 19.2 ms a step."""
    figures = Measurement(
        samples_per_second=summary(64e3 / step_ms),
        ratio=summary(19.2 / step_ms),
        efficiency=summary(19.2 / step_ms / replicas),
        step_ms=StepTime(wait=0.12, step=step_ms),
        peak_memory_mib=398.4,
        startup_s=4.62,
        launches=[launch(repeat, step_ms, seed, wrong) for repeat in range(5)],
    )
    return row(engine, launcher, verdict, replicas, **vars(figures), **rest)


MACHINE = MachineFacts(python="3.11.9", torch="2.13.0", host="workstation", processor="x86_64", cores=8)
DIVERGENCE = Divergence(
    training="sgd",
    step=3,
    quantity="loss",
    tensor=None,
    rank=1,
    expected=2.302585092994046,
    found=2.302585092994057,
    cause=as_said("the update of step 2 is wrong: averaged per rank instead of per row"),
)
NEVER_CLIPPED = message("clipping_never_acted", norm=3.2, limit=5.0)
NO_OP = message("dataparallel_does_nothing_on_cpu")
ONE_ROW = message("batch_norm_gets_one_row", step=23, rank=1)


def compared() -> CompareResults:
    """What a comparison gives."""
    return CompareResults(
        samestep="0.1.0",
        package="0123456789abcdef",
        job="digits",
        settings={"lr": "0.05", "width": "64"},
        world_size=2,
        global_batch=64,
        rows=1500,
        device="cpu",
        machine=MACHINE,
        started="2026-11-20T23:59:00",
        command="samestep compare digits --set lr=0.05 --set width=64",
        repeats=5,
        warmup_steps=20,
        measured_steps=60,
        threads_per_rank=1,
        workers=0,
        dtype="float32",
        proof=Proof(steps=8, dtype="float64"),
        same_as_one_process=OneProcess(
            "no, as expected",
            max_difference=0.3,
            reason=as_said("BatchNorm (1) normalises over each replica's own rows; dropout (7) draws another mask"),
        ),
        engines=[
            measured("single", "process", "same", 19.2, 1, replicas=1, bitwise=True, max_difference=0.0, bound=1e-15),
            measured("ddp", "torchrun", "same", 12.3, bitwise=True, max_difference=0.0, bound=1.2e-15),
            measured("ddp", "spawn", "same", 12.6, bitwise=True, max_difference=0.0, bound=1.2e-15),
            measured("fsdp", "torchrun", "same", 15.1, max_difference=2.2e-16, bound=1.2e-15, notes=(NEVER_CLIPPED,)),
            measured("amp", "torchrun", "approximate", 10.9, wrong=0.02, max_difference=7.7e-5, bound=2.0e-4),
            measured(
                "lightning",
                "torchrun",
                "differs",
                9.0,
                wrong=0.6,
                max_difference=1.1e-2,
                bound=1.2e-15,
                first_divergence=DIVERGENCE,
            ),
            row("horovod", "horovodrun", "failed", reason=as_said("rank 1 was killed (signal 9) in step 12")),
            row("deepspeed", "torchrun", "refused", reason=ONE_ROW),
            row("dataparallel", "process", "unavailable", replicas=1, reason=NO_OP),
        ],
    )


SECOND = SecondProof(5, "threads", "same", bitwise=True, max_difference=0.0, bound=1.2e-15)


def proof_of(results: CompareResults) -> CompareResults:
    """What verify alone gives: the same without any measurement."""
    return replace(
        results,
        command="samestep verify digits",
        repeats=None,
        warmup_steps=None,
        measured_steps=None,
        proof=replace(results.proof, second_steps=4),
        engines=[
            replace(row, second=SECOND if row.engine == "ddp" else None, **vars(Measurement()))
            for row in results.engines
        ],
    )


def unmeasured() -> dict[str, Any]:
    """The figures beside the speed, of a row that lacks them."""
    return {
        name: value for name, value in vars(Measurement()).items() if name not in ("samples_per_second", "launches")
    }


def with_row(results: CompareResults, index: int, **changes: Any) -> CompareResults:
    """The results with one row changed."""
    rows = list(results.engines)
    rows[index] = replace(rows[index], **changes)
    return replace(results, engines=rows)


def with_speed(results: CompareResults, index: int, **changes: Any) -> CompareResults:
    """The results with another median, interval or n of one row's samples/s."""
    speed = results.engines[index].samples_per_second
    assert speed is not None
    return with_row(results, index, samples_per_second=replace(speed, **changes))


def with_step_ms(results: CompareResults, index: int, step_ms: list[float]) -> CompareResults:
    """The results with other step times in the first launch of one row."""
    first, *others = results.engines[index].launches
    return with_row(results, index, launches=[replace(first, step_ms=step_ms), *others])


def with_divergence(results: CompareResults, **changes: Any) -> CompareResults:
    """The results with another first divergence of the engine that differs."""
    return with_row(results, 5, first_divergence=replace(DIVERGENCE, **changes))
