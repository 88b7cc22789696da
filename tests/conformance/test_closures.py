"""Optimizers that need a closure (LBFGS): N ranks take the step of one process, or the engine says that it cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from conformance import jobs_carried, jobs_closures, jobs_phases
from conformance.table import EXACT
from inspected_job import inspected_job
from lane_marks import in_turn, on_engines
from mutations.plant import patched
from planting import FileFault
from ranks import Ranks, engine_facts, prove, skip_unless_here
from samestep import Job, UserError, reference
from samestep.commands.engine_rows import refusal
from samestep.engine import Layout
from samestep.message import message

JOBS = f"{Path(__file__).parent}/jobs_closures.py"
NAMES = ("line_search", "normalized", "clipped", "averaged", "few", "extrapolated")
ENGINES = ("ddp", "single", "split", "accelerate", "fabric", "horovod")


def sizes_of(engine: str) -> tuple[int, ...]:
    return (1,) if engine in ("single", "split") else (2, 3) if engine == "ddp" else (2,)


CASES = on_engines(NAMES, ENGINES, sizes_of, {("clipped", "ddp", 2)})


@pytest.mark.parametrize(("name", "engine", "size"), CASES)
def test_ranks_take_the_references_step(
    name: str, engine: str, size: int, ranks: Callable[..., Ranks], reference_rank: Ranks
) -> None:
    skip_unless_here(engine, size)
    verdict = prove(reference_rank, ranks(size, engine), f"{JOBS}:{name}", engine)
    assert verdict.verdict == "same", verdict


CLOSURE, RUN, DDP = "rank/step.py", "training.py", "engines/ddp.py"
AGAIN = "(self.closure and self.closure.again)"
AGAIN_OF_RUN = "(run._forward.closure and run._forward.closure.again)"
OTHERS = "vars(batch).update(data=[batch.inputs.roll(1, 0), batch.targets]) or batch if self._world.rank else batch"


FAULTS = [
    FileFault(
        "other rows again on rank 1",
        CLOSURE,
        "                backward(batch)\n",
        f"                backward({OTHERS})\n",
    ),
    FileFault(
        "masks drawn anew", CLOSURE, "            stream.manual_seed(", f"            {AGAIN} or stream.manual_seed("
    ),
    FileFault("gradients added up", CLOSURE, "        model.zero_grad()\n", ""),
    FileFault(
        "evaluations recorded", RUN, "if not (self._forward.closure and self._forward.closure.again):", "if True:"
    ),
    FileFault("one evaluation for all", CLOSURE, "if computed_at != _versions(model):", "if False:"),
    FileFault("not clipped again", DDP, " and job.clip_norm", f" and not {AGAIN_OF_RUN} and job.clip_norm"),
    FileFault(
        "not synchronised again",
        DDP,
        "completes_step else",
        f"completes_step and not {AGAIN_OF_RUN} else",
    ),
    FileFault("each rank's own loss", CLOSURE, "if self._world.size > 1:", "if False:"),
]


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=in_turn(4, n) if n else (), id=f.name) for n, f in enumerate(FAULTS)]
)
def test_a_planted_fault_is_caught(fault: FileFault, reference_rank: Ranks, tmp_path: Path) -> None:
    # The number of evaluations must not depend on what the fault changes: ranks would wait for one another.
    job = "extrapolated" if fault in FAULTS[-2:] else "clipped"
    with Ranks(2, patched(fault, tmp_path)) as own:
        verdict = prove(reference_rank, own, f"{JOBS}:{job}", "ddp")
    assert verdict.verdict == "differs" and verdict.first_divergence
    assert verdict.first_divergence.training == "user"  # the other trainings have no closure


def double(job: Job) -> Job:
    rows = TensorDataset(jobs_closures.INPUTS.double(), jobs_closures.TARGETS)
    return replace(job, model=lambda: job.model().double(), train=rows, evaluation=None, shuffle=False)


def by_hand(job: Job, steps: int) -> nn.Module:
    """The loop of torch.optim's documentation, on whole batches."""
    model = job.model()
    optimizer = job.optimizer.build(model)
    inputs, targets = job.train.tensors  # type: ignore[attr-defined]
    rows = len(inputs) // job.global_batch * job.global_batch if job.last == "drop" else len(inputs)
    firsts = list(range(0, rows, job.global_batch))
    for step in range(steps):
        first = firsts[step % len(firsts)]
        batch = slice(first, min(first + job.global_batch, rows))

        @torch.enable_grad()
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs[batch]), targets[batch])  # noqa: B023
            loss.backward()
            if job.clip_norm:
                nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
    return model


def without_dropout(job: Job) -> Job:
    def model() -> nn.Module:
        built = job.model()
        for module in built.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return built

    return replace(job, model=model)


@pytest.mark.parametrize(
    ("name", "replicas"),
    [("line_search", 1), ("line_search", 3), ("normalized", 1), ("clipped", 1), ("few", 3), ("extrapolated", 2)],
)
def test_it_is_the_loop_of_torchs_documentation(name: str, replicas: int) -> None:
    job, steps = without_dropout(double(getattr(jobs_closures, name)())), 4
    job = job if replicas > 1 else replace(job, micro_batch=None)
    state = reference.play(job, Layout(replicas), steps).state
    others = replace(job, optimizer=replace(job.optimizer, settings=job.optimizer.settings | {"lr": 0.019}))
    apart = [
        max(float((state[n] - t).abs().max()) for n, t in by_hand(each, steps).state_dict().items())
        for each in (job, others)
    ]
    assert apart[0] < 1e-12 < 1e-5 < apart[1]


REFUSING = [name for name in (*EXACT, "amp") if name not in ENGINES]


@pytest.mark.parametrize("engine", REFUSING)
def test_who_gives_no_closure_says_so(engine: str) -> None:
    facts = inspected_job(f"{JOBS}:clipped", {}, 2, steps=None)
    assert facts.optimizer.needs_closure
    why = message("engine_gives_no_closure", engine=engine, optimizer="LBFGS", others=[])
    assert refusal(engine_facts(engine, 2), facts) == why


def test_what_is_inexact_gives_none() -> None:
    facts = inspected_job(f"{JOBS}:clipped", {}, 2, steps=None)
    assert refusal(engine_facts("ddp", 2), facts) is None
    for engine, setting in {"ddp": "compress=fp16", "horovod": "compress=fp16", "fabric": "precision=bf16"}.items():
        chosen = engine_facts(engine, 2, dict([setting.split("=")]))
        why = refusal(chosen, facts)
        assert why and why.id == "engine_gives_no_closure"


def test_jobs_that_cannot_have_one() -> None:
    gan, lbfgs = jobs_phases.gan(), jobs_closures.FIXED
    with pytest.raises(UserError, match=r"'discriminator': LBFGS.* closure"):
        replace(gan, optimizer=None, phases=[replace(gan.phases[0], optimizer=lbfgs), gan.phases[1]])  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"optimizer.*several times"):
        replace(jobs_carried.lstm(), optimizer=lbfgs)
