"""Averaged weights, rates that evaluations move, orders of the user's own: proven on every engine, faults seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conformance import jobs_job
from conformance.table import EXACT
from lane_marks import shared_out
from mutations.faults import Fault
from mutations.plant import patched
from ranks import Ranks, RanksFailed, prove, reference_plan, skip_unless_here
from said import said_by_ranks, says
from samestep import reference
from samestep.engine import Layout
from samestep.proof.trace import Expectation
from samestep.records.plan import ProveTask
from samestep.tasks.proof_job import proof_job

HERE = Path(__file__).parent
JOBS: dict[str, tuple[str, dict[str, str]]] = {
    "averaged": (f"{HERE}/jobs_job.py:averaged", {}),
    "plateau": (f"{HERE}/jobs_job.py:plateau", {}),
    **{kind: (f"{HERE}/jobs_job.py:ordered", {"kind": kind}) for kind in ("weighted", "few", "lengths", "function")},
    "plateau of accuracy": (f"{HERE}/jobs_job.py:plateau", {"metric": "accuracy"}),
}
OTHERS = [name for name in EXACT if name not in ("ddp", "fsdp")]
EMA, EVALUATED, SCHEDULE = "rank/weights.py", "rank/evaluate.py", "data/schedule.py"
INDICES = ("indices", "tensors received")
FAULTS = [
    ("averaged", Fault("other decay", EMA, "1 - self.decay", "self.decay", ("parameter",), "")),
    (
        "averaged",
        Fault("no average", EMA, "new in moved], 1 - self.decay", "new in moved], 1.0", ("parameter",), ""),
    ),
    ("averaged", Fault("weights as they are", "training.py", "self.ema.swap()", "pass", ("parameter",), "")),
    (
        "weighted",
        Fault("not by weight", SCHEDULE, "np.asarray(order.weights, dtype", "np.ones(samples, dtype", INDICES, ""),
    ),
    ("lengths", Fault("no buckets", SCHEDULE, "rank[full] * order.buckets", "rank[full] * 0", INDICES, "")),
    ("weighted", Fault("noise alike", "data/loader.py", "(count,) if count", "() if count", ("tensors received",), "")),
    ("plateau", Fault("other metric", EVALUATED, "means[self.metric]", "0.0", ("learning rate",), "")),
]


@pytest.mark.parametrize("name", [name for name in JOBS if name not in ("few", "plateau of accuracy")])
def test_proven_on_ddp(name: str, ranks: Callable[[int], Ranks], reference_rank: Ranks) -> None:
    job, settings = JOBS[name]
    verdict = prove(reference_rank, ranks(2), job, "ddp", settings)
    assert verdict.verdict == "same", verdict


@pytest.mark.parametrize("name", ["averaged"])
def test_proven_on_fsdp(name: str, ranks: Callable[[int], Ranks], reference_rank: Ranks) -> None:
    job, settings = JOBS[name]
    verdict = prove(reference_rank, ranks(2), job, "fsdp", settings)
    assert verdict.verdict == "same", verdict


@pytest.mark.parametrize(("engine", "names"), shared_out([*OTHERS, "fsdp", "single"], [*JOBS], of=2))
def test_proven_on_every_engine(
    engine: str, names: list[str], ranks: Callable[..., Ranks], reference_rank: Ranks
) -> None:
    skip_unless_here(engine)
    own = ranks(1 if engine == "single" else 2, engine)
    for name, (job, settings) in ((name, JOBS[name]) for name in names):
        verdict = prove(reference_rank, own, job, engine, settings)
        assert verdict.verdict == "same", (name, verdict)


@pytest.mark.check
def test_deepspeed_refuses_an_average_in_stage_3(reference_rank: Ranks) -> None:
    skip_unless_here("deepspeed")
    with Ranks(2, engine="deepspeed") as own, pytest.raises(RanksFailed) as failed:
        prove(reference_rank, own, JOBS["averaged"][0], "deepspeed", None, {"stage": "3"})
    says(said_by_ranks(str(failed.value), "Refused"), "deepspeed_stage_3_averages_no_weights")


@pytest.mark.check
@pytest.mark.parametrize(("name", "fault"), FAULTS, ids=lambda value: getattr(value, "name", value))
def test_a_planted_fault_is_seen(name: str, fault: Fault, reference_rank: Ranks, tmp_path: Path) -> None:
    job, settings = JOBS[name]
    with Ranks(2, patched(fault, tmp_path)) as own:
        verdict = prove(reference_rank, own, job, "ddp", settings)
    assert verdict.verdict == "differs" and verdict.first_divergence, verdict
    assert verdict.first_divergence.quantity in fault.named


def test_the_plateaus_rate_moves_in_the_proof(reference_rank: Ranks) -> None:
    """Else its proof would show nothing."""
    job, settings = JOBS["plateau"]
    played = Expectation(reference_rank.work(reference_plan(job, 2, settings)), 0).of("sgd")
    assert len({rate for (rate,) in played.rates}) >= 3


def test_the_reference_averages_what_is_trained() -> None:
    small = proof_job(jobs_job.averaged(), ProveTask("user", 8, "float64", 1, 0.05))
    averaged, plain = (reference.play(job, Layout(1), 8).state for job in (small, _without(small)))
    moved = {name for name in plain if not averaged[name].equal(plain[name])}
    assert moved == {name for name in plain if not name.startswith("frozen") and "running" not in name} - {
        "norm.num_batches_tracked"
    }
    assert averaged["second.weight"].equal(averaged["first.weight"])


def _without(job: jobs_job.Job) -> jobs_job.Job:
    return jobs_job.replace(job, ema=None)
