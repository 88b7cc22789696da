"""check --against: is a script in the working directory the same training as in a git revision, with other packages,
other arguments, or on other ranks?

Both sides are run in copies of the repository's folder that are made before either runs, so that neither sees what the
other writes, and both read the same data. The revision's side has its tracked files.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from samestep.bounds import OTHER_ORDER_APART
from samestep.commands.check import SEED, prepare_folder, record_script
from samestep.commands.command_options import STEPS, CheckOptions
from samestep.commands.compared_sides import Side, first_run, second_run
from samestep.commands.revision import Revision, find_revision
from samestep.commands.side_environment import check_requirements, environment_with, inside, paths_of_copy, versions_of
from samestep.commands.user_sources import MOST_BYTES, read_sources
from samestep.errors import TrainingFailed, UserError
from samestep.judge import first_divergence
from samestep.judge.changed_lines import changed_lines
from samestep.judge.diff import answer_of, compare_records
from samestep.judge.places import Sources
from samestep.judge.record_pair import RecordPair
from samestep.judge.sites import files_of, located
from samestep.judge.step_gradients import coarser_of
from samestep.launch import fork_client
from samestep.message import Message, message
from samestep.records.call_site import CallSite, ChangedLines
from samestep.records.files import write
from samestep.records.findings import DiffResults, Finding
from samestep.records.record import Record
from samestep.records.redaction import redacted_text
from samestep.records.results import RESULTS
from samestep.records.script import ON_CPUS, ScriptRecord
from samestep.records.script_plan import PLAN, ScriptPlan
from samestep.report.language import with_english
from samestep.world.regular_files import make_folder, read_regular

FIRST, SECOND = "before", "after"  # the folders of the records
SHOWN = 3  # how many changed places are shown
SITES = 2  # how many lines of each side are shown


@dataclass(frozen=True)
class Recording:
    """What a side has recorded, and the files from which its ranks have called torch."""

    ranks: list[ScriptRecord]
    record: Record
    sources: Sources


def check_against(options: CheckOptions, words: Sequence[str]) -> DiffResults:
    """Records a script as it is in `options.against`, with the packages of `options.packages`, on
    `options.against_nproc` ranks or by `options.against_command`, and as it is in the working directory; compares the
    steps. words: as of check.

    Raises UserError for a revision or packages that cannot be had, and TrainingFailed where a side fails.
    """
    if options.fix:
        raise UserError(message("fix_does_not_go_with_against"))
    check_requirements(options.packages)
    second = second_run(options, words)
    revision = None if options.against is None else find_revision(options.against.partition(":")[0])
    first = first_run(options, second, revision)
    top = revision.top.resolve() if revision else Path.cwd()
    started = time.time()
    folder = prepare_folder(options, second.script, second.arguments)
    if (folder / FIRST / PLAN).exists():
        raise UserError(f"{folder} holds the record of another check; give another folder with --out")
    with tempfile.TemporaryDirectory(prefix="samestep-against-") as temporary:
        sides = [
            Side.copied(*runs, Path(temporary, name), top=top, started=started, without=folder)
            for runs, name in (((first, second), FIRST), ((second, first), SECOND))
        ]
        if revision:
            revision.place(sides[0].top)
        pythons = [sys.executable, sys.executable]
        if options.packages:
            pythons[0] = environment_with(options.packages, Path(temporary, "environment"))
        recordings = []
        try:
            for side, name, python in zip(sides, (FIRST, SECOND), pythons):
                out = folder / name
                make_folder(out)
                run = side.run
                plan = ScriptPlan(
                    str(out), started, run.script, run.arguments, options.steps or STEPS, weights=True, seed=SEED
                )
                plan = replace(plan, as_cpu=bool(options.as_cpu))
                recordings.append(_recorded(options, plan, side, top, python))
        finally:
            fork_client.close()
        results = _compared(recordings, sides, top, revision, folder)
    of_sides = [*versions_of(options.packages), *(revision.notes if revision else [])]
    results = with_english(replace(results, notes=[*of_sides, *results.notes]))
    write(folder / RESULTS, results)
    return results


def _recorded(options: CheckOptions, plan: ScriptPlan, side: Side, top: Path, python: str) -> Recording:
    """Records one side. python: that runs its ranks. Raises UserError where they have run the working directory's code
    in place of the side's own."""

    def in_copy(word: str) -> str:
        path = Path(word)
        return str(side.top / path.resolve().relative_to(top)) if _is_below(path, top) else word

    given = os.environ.get("PYTHONPATH", "")
    search = [*paths_of_copy(top, side.top), *([given] if given else [])]
    variables = {"PYTHONPATH": os.pathsep.join(search)} if search else {}
    # Each process orders the texts of a set in its own way.
    variables["PYTHONHASHSEED"] = os.environ.get("PYTHONHASHSEED", "0")
    if python != sys.executable:
        variables["PATH"] = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)])
    run = side.run
    plan = replace(plan, script=in_copy(run.script), arguments=tuple(map(in_copy, run.arguments)), module=run.module)
    try:
        with inside(side.work, variables):
            command = run.command and [*map(in_copy, run.command)]
            _, ranks, record = record_script(replace(options, nproc=run.nproc), plan, command, python)
    except TrainingFailed as error:
        raise TrainingFailed(message("side_fails", side=run.title, why=error.message)) from error
    if search:
        fork_client.close()  # the next side imports from elsewhere
    files = files_of(ranks)
    if foreign := next((file for file in files if Path(file).is_relative_to(top)), None):
        raise UserError(message("side_ran_the_working_directory", side=run.title, file=foreign))
    return Recording(ranks, record, read_sources(files))


def _is_below(path: Path, top: Path) -> bool:
    """Returns whether a word of the command line is an absolute path below a folder."""
    with suppress(OSError, ValueError):
        return path.is_absolute() and path.resolve().is_relative_to(top)
    return False


def _compared(
    recordings: Sequence[Recording], sides: Sequence[Side], top: Path, revision: Revision | None, folder: Path
) -> DiffResults:
    first, second = recordings
    pair = RecordPair(first.ranks, second.ranks, first.record, second.record).with_matched_names()
    findings = [_with_lines(finding, pair, recordings) for finding in compare_records(pair)]
    divergence = first_divergence(findings)
    found = next((finding for finding in findings if divergence and finding.divergence == divergence), None)
    changes = _changes(sides, revision, found) if revision else []
    placed_findings = [_in_place(finding, sides, top, revision) for finding in findings]
    return DiffResults(
        first=sides[0].run.title,
        second=sides[1].run.title,
        steps=pair.steps,
        answer=answer_of(findings),
        findings=placed_findings,
        first_divergence=divergence,
        notes=_notes(pair, first_divergence(findings) is None),
        changes=changes[:SHOWN],
        more_changes=max(0, len(changes) - SHOWN),
        against=sides[0].run.title,
        folder=str(folder),
    )


def _with_lines(finding: Finding, pair: RecordPair, recordings: Sequence[Recording]) -> Finding:
    """Returns a finding with the lines of both sides where it differs."""
    if finding.answer != "differs":
        return finding
    first, second = recordings
    (in_first,) = located([finding], first.ranks, first.sources)
    divergence = finding.divergence
    if divergence and divergence.tensor:
        divergence = replace(divergence, tensor=pair.named_in_second(divergence.tensor))
    (in_second,) = located([replace(finding, divergence=divergence)], second.ranks, second.sources)
    return replace(finding, sites=in_second.sites[:SITES], expected_sites=in_first.sites[:SITES])


def _in_place(finding: Finding, sides: Sequence[Side], top: Path, revision: Revision | None) -> Finding:
    """Returns a finding whose lines are those of the user's files, and of the revision's, not of their copies."""
    first, second = sides

    def in_revision(site: CallSite) -> CallSite:
        return replace(site, file=f"{revision.name}:{os.path.relpath(site.file, first.work)}") if revision else site

    def here(site: CallSite, side: Side) -> CallSite:
        path = Path(site.file)
        return replace(site, file=str(top / path.relative_to(side.top))) if _is_below(path, side.top) else site

    sites = [here(site, second) for site in finding.sites]
    if revision:
        return replace(finding, sites=sites, expected_sites=[in_revision(site) for site in finding.expected_sites])
    # Both sides have the same files.
    expected = [site for site in (here(site, first) for site in finding.expected_sites) if site not in sites]
    return replace(finding, sites=sites, expected_sites=expected)


def _changes(sides: Sequence[Side], revision: Revision, found: Finding | None) -> list[ChangedLines]:
    """Returns the places that the two sides have otherwise, those that a finding is likely to come from first."""
    names = {*revision.files, *revision.tracked}
    for finding_site in (*(found.sites if found else ()), *(found.expected_sites if found else ())):
        for side in sides:
            if _is_below(Path(finding_site.file), side.top):
                names.add(Path(finding_site.file).relative_to(side.top).as_posix())
    texts = _texts(sides, sorted(names))
    sites = [_named(site, sides[1].top) for site in (found.sites if found else ())]
    expected = [_named(site, sides[0].top) for site in (found.expected_sites if found else ())]
    places = changed_lines(*texts, found, sites, expected)
    return [replace(place, text=redacted_text(place.text)) for place in places]


def _named(site: CallSite, top: Path) -> CallSite:
    """Returns a line of a copy whose file is named as from the copy's top."""
    return replace(site, file=os.path.relpath(site.file, top))


def _texts(sides: Sequence[Side], names: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the texts of files that are not the same on both sides."""
    texts: tuple[dict[str, str], dict[str, str]] = {}, {}
    for name in names:
        read = [_bytes(side.top / name) for side in sides]
        if read[0] != read[1]:
            for held, contents in zip(texts, read):
                if contents is not None and b"\0" not in contents:
                    held[name] = contents.decode(errors="replace")
    return texts


def _bytes(file: Path) -> bytes | None:
    with suppress(OSError):
        return read_regular(file, MOST_BYTES)
    return None


def _notes(pair: RecordPair, same: bool) -> list[Message]:
    notes = [note for note in pair.second[0].notes if note.id == ON_CPUS]
    if pair.on_other_ranks:
        notes.append(message("compared_on_other_ranks", first=len(pair.first), second=len(pair.second)))
    if same:
        notes.append(message("what_was_compared", steps=pair.steps))
        distance = pair.distances[0] if pair.steps else None
        if distance is not None and distance > OTHER_ORDER_APART * coarser_of(pair.first):
            notes.append(message("further_apart_than_rounding", distance=distance))
        if distance:
            notes += _other_functions(pair, distance)
    return notes


def _other_functions(pair: RecordPair, distance: float) -> list[Message]:
    """Returns that the losses of the two sides are computed by other functions. At the weights that a training begins
    with, functions that are not the same may be as near to each other as rounding is."""
    first, second = ({*ranks[0].functions} for ranks in (pair.first, pair.second))
    if not first or not second or first == second:
        return []
    gone, new = sorted(first - second), sorted(second - first)
    return [message("computed_by_other_functions", gone=gone or None, new=new or None, distance=distance)]
