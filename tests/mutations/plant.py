"""Plants a fault in a copy of the package, and proves jobs with it on ranks that tests keep.

record.py plants through the command instead, as users have it.
"""

from __future__ import annotations

import ast
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from messages import explains, ids
from mutations.faults import Fault
from mutations.parts import Parts, reason
from planting import FilePatch, with_patches
from ranks import ONE_PROCESS, SOURCE, Ranks, RanksFailed, engine_facts, judged, proof_plan, reference_plan
from samestep.proof.trace import Expectation
from samestep.records.inspection import EngineFacts
from samestep.records.origin import Origin
from samestep.records.plan import Plan
from samestep.records.record import Record
from samestep.records.results import Verdict

# The messages that say along which axes it is.
AXES_KNOWN = {"wrong_along_axes", "wrong_along_axis", "wrong_along_axes_together", "wrong_on_one_rank"}


def patched(fault: FilePatch, folder: Path) -> Path:
    """The package with the fault in it: one changed file, and links to all others, which take a tenth of a copy's time.
    Raises ValueError when the patch does not apply, SyntaxError when it leaves no Python."""
    new = with_patches((SOURCE / "samestep" / fault.file).read_text(), fault)
    ast.parse(new)  # raises SyntaxError: what cannot be imported is no fault to be caught
    source = folder / "src"
    changed = source / "samestep" / fault.file
    changed.parent.mkdir(parents=True)
    changed.write_text(new)
    # Not a link: Python writes what it compiles of the changed file there.
    compiled = changed.parent / "__pycache__"
    compiled.mkdir()
    for path in (SOURCE / compiled.relative_to(source)).glob("*.pyc"):
        if path.name.partition(".")[0] != changed.stem:
            shutil.copy2(path, compiled)
    for parent in (path for path in changed.parents if source in path.parents):
        for path in (SOURCE / parent.relative_to(source)).iterdir():
            if not (parent / path.name).exists():
                (parent / path.name).symlink_to(path)
    return source


class References:
    """Plays the reference of each job at `size` replicas in each engine's layout once, with its rank's package."""

    def __init__(self, reference_rank: Ranks, size: int) -> None:
        self.reference_rank, self.size = reference_rank, size

    def of(self, job: str, facts: EngineFacts, also: str) -> Record:
        plan = reference_plan(f"jobs:{job}", self.size, {}, facts, also)
        return self.reference_rank.played(plan)


def sizes_of(fault: Fault, sizes: Sequence[int]) -> Sequence[int]:
    """The numbers of ranks to plant a fault at: one, where its engine is one process."""
    return (1,) if fault.engine in ONE_PROCESS else sizes


def plant(
    fault: Fault, references: References, jobs: Sequence[str] = (), *, threads: bool = False, where: bool = False
) -> Iterator[dict[str, Any]]:
    """What the proof says about one fault on each of its jobs, at the references' number of ranks.

    The fault is on both sides, as users have one package: the reference is played by the patched one, too. Of a fault
    in an engine's file it is not, which no reference imports: `references` serve for all of these.

    jobs: these, instead of the fault's own. threads: the ranks are threads. where: parts of the mesh are proven, too.
    """
    size = references.size
    facts = engine_facts(fault.engine, size, fault.settings, fault.mesh)
    with ExitStack() as stack:
        source = patched(fault, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        ranks = stack.enter_context(Ranks(size, source, engine=fault.engine, threads=threads))
        if not fault.file.startswith("engines/"):
            references = References(stack.enter_context(Ranks(1, source)), size)
        for job in jobs or fault.jobs:
            row: dict[str, Any] = {"fault": fault.name, "file": fault.file, "job": job, "ranks": size}
            row |= {"engine": fault.engine, "settings": dict(fault.settings)}
            reference, plans = references.of(job, facts, fault.also), list[Plan]()

            def train(loop: Expectation, own: Expectation | None) -> Record:
                plans.append(proof_plan(loop, f"jobs:{job}", fault.engine, size, {}, facts, own))  # noqa: B023
                return ranks.work(plans[-1])  # noqa: B023

            try:
                verdict = judged(reference, facts, train, fault.also, references.reference_rank.work)
            except RanksFailed as error:
                verdict = Verdict("failed", reason=reason(error))
            if where and verdict.verdict in ("differs", "failed"):
                with Parts(fault, source, references.reference_rank, threads=threads) as parts:
                    verdict = replace(verdict, origin=parts.origin(plans[-1], size, verdict))
            yield row | told(fault, verdict) | {"notes": verdict.notes}


def told(fault: Fault, verdict: Verdict) -> dict[str, Any]:
    """What a verdict says of a planted fault; the reason of a launch that fails names it where that is its cause.
    explained: None where no cause is asked: what the fault does is no candidate."""
    first = verdict.first_divergence
    if first is None:
        named = verdict.verdict == "failed" and bool(fault.cause) and explains(verdict.reason, fault.cause)
        told = {"verdict": verdict.verdict, "named": named, "explained": named, "reason": str(verdict.reason)}
        return told | located(fault, verdict.origin)
    shown = ("training", "quantity", "step", "tensor", "expected", "found")
    return {
        "verdict": verdict.verdict,
        "named": first.quantity in fault.named,
        "explained": explains(first.cause, fault.cause) if fault.cause else None,
        "cause": str(first.cause),
        "ids": sorted(ids(first.cause)),
        **{key: getattr(first, key) for key in shown},
        **located(fault, verdict.origin),
    }


def located(fault: Fault, origin: Origin | None) -> dict[str, Any]:
    """Where an origin says that a fault is, and whether that is right; empty without one. A training that fails has no
    module: nothing of it is compared."""
    if origin is None:
        return {}
    known = bool({said.id for said in origin.said} & AXES_KNOWN)
    failed = any(trial.differs is None for trial in origin.trials[:1])
    return {
        "axes": list(origin.axes) if known else None,
        "axes_right": known and {*origin.axes} == {*fault.axes},
        "module": origin.module,
        "module_right": not failed and (origin.module in fault.modules or not (origin.module or fault.modules)),
        "where": [said.fields | {"id": said.id} for said in origin.said],
        "trials": [(trial.mesh, trial.differs, trial.why and str(trial.why)) for trial in origin.trials],
    }
