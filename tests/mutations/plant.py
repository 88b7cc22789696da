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
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parents[1]))

from messages import explains, ids
from mutations.faults import Fault
from ranks import ONE_PROCESS, SOURCE, Ranks, RanksFailed, engine_facts, judged, proof_plan, reference_plan
from samestep.records.inspection import EngineFacts
from samestep.records.record import Record
from samestep.records.results import Verdict


class Patch(Protocol):
    """What is planted: `new` for `old` in a file of the package."""

    @property
    def name(self) -> str: ...
    @property
    def file(self) -> str: ...
    @property
    def old(self) -> str: ...
    @property
    def new(self) -> str: ...


def patched(fault: Patch, folder: Path) -> Path:
    """The package with the fault in it: one changed file, and links to all others, which take a tenth of a copy's time.
    Raises ValueError when the patch does not apply, SyntaxError when it leaves no Python."""
    text = (SOURCE / "samestep" / fault.file).read_text()
    if text.count(fault.old) != 1:
        raise ValueError(
            f"'{fault.name}' does not apply: its text stands {text.count(fault.old)} times in {fault.file}"
        )
    new = text.replace(fault.old, fault.new)
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
    fault: Fault, references: References, jobs: Sequence[str] = (), *, threads: bool = False
) -> Iterator[dict[str, Any]]:
    """What the proof says about one fault on each of its jobs, at the references' number of ranks.

    The fault is on both sides, as users have one package: the reference is played by the patched one, too. Of a fault
    in an engine's file it is not, which no reference imports: `references` serve for all of these.

    jobs: these, instead of the fault's own. threads: the ranks are threads.
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
            try:
                verdict = judged(
                    references.of(job, facts, fault.also),
                    facts,
                    lambda loop, own: ranks.work(proof_plan(loop, f"jobs:{job}", fault.engine, size, {}, facts, own)),  # noqa: B023
                    fault.also,
                    references.reference_rank.work,
                )
            except RanksFailed as error:
                yield row | {
                    "verdict": "failed",
                    "named": False,
                    "explained": False,
                    "reason": str(error).splitlines()[-1],
                }
                continue
            yield row | told(fault, verdict) | {"notes": verdict.notes}


def told(fault: Fault, verdict: Verdict) -> dict[str, Any]:
    """What a verdict says of a planted fault; the reason of a launch that fails names it where that is its cause.
    explained: None where no cause is asked: what the fault does is no candidate."""
    first = verdict.first_divergence
    if first is None:
        named = verdict.verdict == "failed" and explains(verdict.reason, fault.cause)
        return {"verdict": verdict.verdict, "named": named, "explained": named, "reason": str(verdict.reason)}
    shown = ("training", "quantity", "step", "tensor", "expected", "found")
    return {
        "verdict": verdict.verdict,
        "named": first.quantity in fault.named,
        "explained": explains(first.cause, fault.cause) if fault.cause else None,
        "cause": str(first.cause),
        "ids": sorted(ids(first.cause)),
        **{key: getattr(first, key) for key in shown},
    }
