"""Plays a recorded script again in one process, in a copy of the working directory.

The replay writes no file of the user's, and reads none that the recording has written.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from samestep.errors import TrainingFailed, UserError
from samestep.message import Message, message
from samestep.proof.script.assembled import ReplicaRecord, of_replicas
from samestep.proof.script.first_module import with_module, with_places
from samestep.proof.script.layout import ByHand, Layout, TensorLayout
from samestep.proof.script.replay import judge_replay, not_replayed
from samestep.proof.script.replica_causes import cause_within_replica
from samestep.proof.script.replicas import of_one_replica
from samestep.proof.script.warnings import leaves_training_mode
from samestep.records.files import read, write
from samestep.records.findings import Finding
from samestep.records.record import Record
from samestep.records.script import ScriptRecord
from samestep.records.script_plan import KEPT, PLAN, REPLAY_FOLDER, REPLAYED, ReplayPlan, ReplayRecord, ScriptPlan
from samestep.world.regular_files import make_folder, read_regular, remove_made_folder

Run = Callable[[Path], Record]  # runs the plan in a folder, in one process
COPIED = 1 << 20  # bytes of a file that is copied; a larger one is linked
# The most entries of a folder that is copied, and of all; a larger folder is linked as a whole.
ENTRIES, ALL = 1000, 20_000
LEVELS = 3  # how many folders above the working directory a script may name
ABOVE = re.compile(r"""["'\s=]((?:\.\./)*\.\.)(?:/([^"'\s]*))?(?=["'\s])""")  # '..', '../..', '../data/train.bin'
ABOVE_FILE = re.compile(r"dirname\(|\.parents?\b")  # of __file__, on the search path
LINKED = {".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", "site-packages"}


def replay(plan: ScriptPlan, ranks: Sequence[ScriptRecord], record: Record, run: Run) -> list[Finding]:
    """Plays a script's record in one process; answers whether it has taken the same steps.

    Raises UserError where the launch is a mistake of the user's.
    """
    folder = Path(plan.out)
    if why := _why_not(ranks, folder):
        return [not_replayed(why)]
    with tempfile.TemporaryDirectory(prefix="samestep-replay-") as temporary:
        work = work_folder(plan, Path(temporary))
        layout = Layout.of(ranks).tensors
        try:
            result, told_ranks = _play_or_tell(plan, ranks, work, run, layout)
        except (TrainingFailed, UserError) as error:
            return [not_replayed(message("script_fails_in_one_process", error=error.message))]
        findings = _judged(result, ranks, layout, record, folder)
        if layout and told_ranks == len(ranks) > 1 and all(finding.answer == "right" for finding in findings):
            # A value that depends on this number changes with it; a script may take it for its number of replicas.
            with suppress(TrainingFailed):
                again = play(plan, ranks, work, run, layout=layout, told_ranks=2 * told_ranks)
                findings_again = _judged(again, ranks, layout, record, folder)
                told_ranks = 1 if all(finding.answer == "right" for finding in findings_again) else told_ranks
    if not layout:
        if result.feed != "whole":
            return findings
        return with_places(findings, ranks, read(ScriptRecord, folder / REPLAY_FOLDER / "rank0.json"))

    def cause(step: int) -> Message | None:
        replicas, of_all = of_replicas(ranks, layout), ReplicaRecord(record.folder, ranks, layout)
        of_one = Record(folder / REPLAY_FOLDER)
        return cause_within_replica(ranks, replicas, layout, record=of_all, replay=of_one, result=result, step=step)

    return with_modules([of_one_replica(finding, layout, told_ranks, cause) for finding in findings], plan, ranks)


def _judged(
    result: ReplayRecord, ranks: Sequence[ScriptRecord], layout: TensorLayout | None, record: Record, folder: Path
) -> list[Finding]:
    """Compares what was played last with the ranks, or their replicas."""
    replayed, size = folder / REPLAY_FOLDER, len(ranks)
    one_process = read(ScriptRecord, replayed / "rank0.json")
    if layout:
        ranks, record = of_replicas(ranks, layout), ReplicaRecord(record.folder, ranks, layout)
    return judge_replay(result, ranks, one_process, record, Record(replayed), size=size)


def with_modules(findings: Sequence[Finding], plan: ScriptPlan, ranks: Sequence[ScriptRecord]) -> list[Finding]:
    """Returns findings; those of ranks that share out a model with the module that computes something else than in the
    replay, if there was one."""
    path, layout = Path(plan.out) / REPLAY_FOLDER / "rank0.json", Layout.of(ranks).tensors
    if layout is None or not layout.tensor or not path.exists():
        return [*findings]
    one_process, size = read(ScriptRecord, path), len(layout.replicas[0])
    return [with_module(finding, ranks, one_process, layout.axis, size) for finding in findings]


def work_folder(plan: ScriptPlan, temporary: Path) -> Path:
    """Returns a copy of the working directory, below a temporary folder."""
    work = Path(temporary, *["root", *["folder"] * LEVELS, *Path.cwd().parts[1:]][-LEVELS - 1 :])
    copy_folder(Path.cwd(), work, plan.started_at, Path(plan.out))
    copy_beside(plan, work)
    return work


def _play_or_tell(
    plan: ScriptPlan, ranks: Sequence[ScriptRecord], work: Path, run: Run, layout: TensorLayout | None
) -> tuple[ReplayRecord, int]:
    """Plays the record; a script that divides the ranks by the size of a replica, and so cannot run as one, is told
    that there are as many as a replica has. Returns how many it was told, too."""
    told = 1
    try:
        result = play(plan, ranks, work, run, layout=layout)
    except TrainingFailed:
        told = len(layout.replicas[0]) if layout else 1
        if told == 1:
            raise
        result = play(plan, ranks, work, run, layout=layout, told_ranks=told)
    if result.needs_turns:
        result = play(plan, ranks, work, run, layout=layout, in_turn=True, told_ranks=told)
    return result, told


def _why_not(ranks: Sequence[ScriptRecord], folder: Path) -> Message | None:
    """Returns why a record is not to be replayed; None where it is."""
    if not min(len(rank.steps) for rank in ranks):
        return message("no_step_to_replay")
    if Layout.of(ranks).kind == "stages":
        return message("pipeline_stages_not_replayed")
    if not all((folder / KEPT.format(rank)).is_file() for rank in range(len(ranks))):
        return message("batches_not_kept")
    if any(map(leaves_training_mode, ranks)):
        return message("trained_in_evaluation_mode")
    return None


def play(
    plan: ScriptPlan,
    ranks: Sequence[ScriptRecord],
    work: Path,
    run: Run,
    *,
    layout: TensorLayout | ByHand | None,
    in_turn: bool = False,
    told_ranks: int = 1,
    small_gradients: bool = False,
) -> ReplayRecord:
    """Plays a record once; the first step alone with small gradients, which nothing clips. layout: of ranks that share
    out a model."""
    folder, steps = Path(plan.out) / REPLAY_FOLDER, ranks[0].steps
    remove_made_folder(folder)  # files of another replay
    make_folder(folder)
    replay_plan = ReplayPlan(
        record=plan.out,
        ranks=len(ranks),
        work=str(work),
        rates=[step.rates for step in steps],
        micro_batches=[len(step.micro_batches) for step in steps],
        in_turn=in_turn,
        calls=[step.calls for step in steps],
        alone=ranks[0].alone,
        readers=layout.readers(ranks) if layout else [],
        told_ranks=told_ranks,
        by_hand=layout.replicas if isinstance(layout, ByHand) else [],
        small_gradients=small_gradients,
    )
    count = 1 if small_gradients else len(steps)
    of_one_process = replace(plan, out=str(folder), script=_script(plan), steps=count, keep=False)
    write(folder / PLAN, replace(of_one_process, replay=replay_plan))
    run(folder)
    return read(ReplayRecord, folder / REPLAYED)


def _script(plan: ScriptPlan) -> str:
    """Returns a script's path relative to the working directory, of which the copy has one; others stay absolute."""
    if plan.module:
        return plan.script
    script = Path(os.path.abspath(plan.script))  # without the .. that a typed path may have
    inside = script.is_relative_to(Path.cwd())
    return str(script.relative_to(Path.cwd()) if inside else script)


def copy_folder(source: Path, target: Path, since: float, without: Path) -> None:
    """Copies a folder's small files and links its large ones.

    Leaves out the folder `without`, and files that have changed since `since`, in seconds of the epoch.
    """
    _copy(source, target, since, without.resolve(), [ALL])


def copy_beside(plan: ScriptPlan, work: Path) -> None:
    """Copies or links what a script names above the working directory, as '../data', to where the copy has it; of '..'
    itself, and of folders that it puts on the search path, the Python modules."""
    text = ""
    with suppress(OSError):
        text = "" if plan.module else read_regular(Path(plan.script), COPIED).decode(errors="replace")
    named = {*ABOVE.findall(f"{text} {' '.join(plan.arguments)} ")}
    if "sys.path" in text and ABOVE_FILE.search(text):
        named |= {("..", ""), ("../..", "")}
    cwd = Path.cwd().resolve()
    # Whole folders first: one of them is not copied where a single file of it already is.
    for above, below in sorted(named, key=lambda part: bool(part[1])):
        levels = above.count("..")
        if levels > min(LEVELS, len(cwd.parents) - 1):
            continue
        source, target = cwd.parents[levels - 1], work.parents[levels - 1]
        if below:
            _copy_path(source / below, target / below, plan.started_at)
            continue
        with suppress(OSError), os.scandir(source) as entries:
            for entry in [entry for entry in entries if _is_module(entry)]:
                _copy_path(source / entry.name, target / entry.name, plan.started_at)


def _is_module(entry: os.DirEntry[str]) -> bool:
    """Returns whether a folder's entry is a Python module, or a folder that holds some."""
    if entry.is_file():
        return entry.name.endswith(".py")
    with suppress(OSError):
        return entry.name.isidentifier() and any(Path(entry.path).glob("*.py"))
    return False


def _copy_path(source: Path, target: Path, since: float) -> None:
    """Copies a small file or folder, and links a large one, unless it is there or was written since `since`."""
    with suppress(OSError):
        if target.exists() or not source.exists() or (source.is_file() and source.stat().st_mtime >= since):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir() and _entries(source) <= ENTRIES:
            _copy(source, target, since, source / ".", [ALL])
        elif source.is_dir() or source.stat().st_size > COPIED:
            target.symlink_to(source.resolve())
        else:
            shutil.copy2(source, target)


def _copy(source: Path, target: Path, since: float, without: Path, left: list[int]) -> None:
    """Copies a folder's entries. left: how many more entries may be copied, in its one element."""
    target.mkdir(parents=True)
    with suppress(OSError), os.scandir(source) as scan:
        entries = list(scan)
        left[0] -= len(entries)
        for entry in entries:
            path = Path(entry.path)
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    if path.resolve() == without:
                        continue
                    if entry.name in LINKED or left[0] < 0 or _entries(path) > ENTRIES:
                        (target / entry.name).symlink_to(path)
                    else:
                        _copy(path, target / entry.name, since, without, left)
                    continue
                facts = entry.stat()
                if max(facts.st_mtime, facts.st_ctime) >= since:
                    continue
                if facts.st_size <= COPIED and entry.is_file():
                    shutil.copy2(path, target / entry.name)
                else:
                    (target / entry.name).symlink_to(path)


def _entries(path: Path) -> int:
    with os.scandir(path) as entries:
        return sum(1 for _ in entries)
