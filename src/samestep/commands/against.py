"""check --against: is a script in the working directory the same training as in a git revision, or with other packages?

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

from samestep.commands.check import prepare_folder, record_script, words_of
from samestep.commands.check_replay import LEVELS, copy_beside, copy_folder
from samestep.commands.command_options import CheckOptions
from samestep.commands.revision import Revision, find_revision
from samestep.commands.side_environment import check_requirements, environment_with, inside, paths_of_copy
from samestep.commands.user_sources import MOST_BYTES, read_sources
from samestep.errors import TrainingFailed, UserError
from samestep.launch import fork_client
from samestep.message import Message, message
from samestep.proof.script import first_divergence
from samestep.proof.script.changed_lines import changed_lines
from samestep.proof.script.diff import answer_of, compare_records
from samestep.proof.script.record_pair import RecordPair
from samestep.proof.script.sites import Sources, files_of, located
from samestep.records.call_site import CallSite
from samestep.records.files import write
from samestep.records.record import Record
from samestep.records.redaction import redacted_text
from samestep.records.results import RESULTS
from samestep.records.script import PLAN, ChangedLines, DiffResults, Finding, ScriptPlan, ScriptRecord
from samestep.report.language import with_english
from samestep.world.regular_files import read_regular

FIRST, SECOND = "before", "after"  # the folders of the records
SHOWN = 3  # changed places
SITES = 2  # lines of each side


@dataclass(frozen=True)
class Side:
    """One side of a comparison. title: as it is named. top: its copy of the repository's folder. place: of the working
    directory in `top`. python: that runs its ranks. script: '': that of the other side."""

    title: str
    top: Path
    place: Path
    python: str = sys.executable
    script: str = ""

    @property
    def work(self) -> Path:
        return self.top / self.place


@dataclass(frozen=True)
class Recording:
    """What a side has recorded, and the files from which its ranks have called torch."""

    ranks: list[ScriptRecord]
    record: Record
    sources: Sources


def check_against(options: CheckOptions, words: Sequence[str]) -> DiffResults:
    """Records a script as it is in `options.against`, or with the packages of `options.packages`, and as it is in the
    working directory; compares the steps. words: as of check.

    Raises UserError for a revision or packages that cannot be had, and TrainingFailed where a side fails.
    """
    if options.fix:
        raise UserError(message("fix_does_not_go_with_against"))
    check_requirements(options.packages)
    command, script, arguments = words_of(options, words)
    name, _, other_script = (options.against or "").partition(":")
    revision = None if options.against is None else find_revision(name)
    here = Path.cwd()
    top = revision.top.resolve() if revision else here
    place = here.resolve().relative_to(top)
    if revision and not command:
        other_script = _script_there(options, revision, other_script or script, place, given=bool(other_script))
    started = time.time()
    folder = prepare_folder(options, script, arguments)
    if (folder / FIRST / PLAN).exists():
        raise UserError(f"{folder} holds the record of another check; give another folder with --out")
    title = " ".join(
        [revision.title if revision else script, *(["with", *options.packages] if options.packages else [])]
    )
    with tempfile.TemporaryDirectory(prefix="samestep-against-") as temporary:
        first = Side(title, _place_of(Path(temporary, FIRST), top, place), place, script=other_script)
        second = Side(script, _place_of(Path(temporary, SECOND), top, place), place)
        plan = ScriptPlan("", started, script, tuple(arguments), options.steps, module=options.module, weights=True)
        for side in (first, second):
            copy_folder(top, side.top, started, folder)
            copy_beside(plan, side.work)
            _remove_bytecode(side.top)
        if revision:
            revision.place(first.top)
        if options.packages:
            first = replace(first, python=environment_with(options.packages, Path(temporary, "environment")))
        recordings = []
        try:
            for side, name in ((first, FIRST), (second, SECOND)):
                out = folder / name
                out.mkdir()
                moved = replace(plan, out=str(out))
                recordings.append(_recorded(options, moved, command, side, top))
        finally:
            fork_client.close()
        results = _compared(recordings, (first, second), top, revision, folder)
    if revision:
        results = replace(results, notes=[*results.notes, *revision.notes])
    results = with_english(results)
    write(folder / RESULTS, results)
    return results


def _script_there(options: CheckOptions, revision: Revision, script: str, place: Path, *, given: bool) -> str:
    """Returns a script's path in the working directory of a revision's copy. Raises UserError where the revision does
    not have it. given: whether it was given with the revision."""
    if options.module:
        paths = [place / script.replace(".", "/") / "__main__.py", place / f"{script.replace('.', '/')}.py"]
        is_here = any((revision.top / path).is_file() for path in paths)
        if is_here and not any(path.as_posix() in revision.files for path in paths):
            raise UserError(message("revision_without_script", revision=revision.title, script=script))
        return script
    # As git has it, a path is from the top of the repository; as it is typed for this command, from here.
    here = Path(os.path.abspath(script))
    paths = [Path(script)] if given else []
    if here.is_relative_to(Path.cwd()):
        paths.append(place / here.relative_to(Path.cwd()))
    elif here.is_relative_to(revision.top):
        paths.append(here.relative_to(revision.top))
    found = next((path for path in paths if path.as_posix() in revision.files), None)
    if found is None:
        raise UserError(message("revision_without_script", revision=revision.title, script=script))
    return os.path.relpath(found, place)


def _place_of(folder: Path, top: Path, place: Path) -> Path:
    """Returns where in a temporary folder a copy of `top` goes: with folders above the working directory, as these may
    be named as '..'."""
    above = max(LEVELS - len(place.parts), 0)
    names = ["root", *["folder"] * LEVELS, *top.parts[1:]]
    return Path(folder, *names[-above - 1 :])


def _remove_bytecode(top: Path) -> None:
    """Removes the links to folders of compiled modules: Python would write those of the copy there."""
    for folder, names, _ in os.walk(top):
        if "__pycache__" in names and (link := Path(folder, "__pycache__")).is_symlink():
            link.unlink()


def _recorded(
    options: CheckOptions, plan: ScriptPlan, command: Sequence[str] | None, side: Side, top: Path
) -> Recording:
    """Records one side. Raises UserError where it has run the working directory's code in place of its own."""

    def in_copy(word: str) -> str:
        path = Path(word)
        return str(side.top / path.resolve().relative_to(top)) if _is_below(path, top) else word

    given = os.environ.get("PYTHONPATH", "")
    search = [*paths_of_copy(top, side.top), *([given] if given else [])]
    variables = {"PYTHONPATH": os.pathsep.join(search)} if search else {}
    if side.python != sys.executable:
        variables["PATH"] = os.pathsep.join([str(Path(side.python).parent), os.environ.get("PATH", os.defpath)])
    script = side.script or in_copy(plan.script)
    plan = replace(plan, script=script, arguments=tuple(map(in_copy, plan.arguments)))
    try:
        with inside(side.work, variables):
            _, ranks, record = record_script(options, plan, command and [*map(in_copy, command)], side.python)
    except TrainingFailed as error:
        raise TrainingFailed(message("side_fails", side=side.title, why=error.message)) from error
    if variables:
        fork_client.close()  # the next side imports from elsewhere
    files = files_of(ranks)
    if foreign := next((file for file in files if Path(file).is_relative_to(top)), None):
        raise UserError(message("side_ran_the_working_directory", side=side.title, file=foreign))
    return Recording(ranks, record, read_sources(files))


def _is_below(path: Path, top: Path) -> bool:
    """Whether a word of the command line is an absolute path below a folder."""
    with suppress(OSError, ValueError):
        return path.is_absolute() and path.resolve().is_relative_to(top)
    return False


def _compared(
    recordings: Sequence[Recording], sides: tuple[Side, Side], top: Path, revision: Revision | None, folder: Path
) -> DiffResults:
    first, second = recordings
    pair = RecordPair(first.ranks, second.ranks, first.record, second.record).with_matched_names()
    findings = [_with_lines(finding, pair, recordings) for finding in compare_records(pair)]
    divergence = first_divergence(findings)
    found = next((finding for finding in findings if divergence and finding.divergence == divergence), None)
    changes = _changes(sides, revision, found) if revision else []
    shown = [_in_place(finding, sides, top, revision) for finding in findings]
    return DiffResults(
        first=sides[0].title,
        second=sides[1].title,
        steps=pair.steps,
        answer=answer_of(findings),
        findings=shown,
        first_divergence=divergence,
        notes=_notes(pair, first_divergence(findings) is None),
        changes=changes[:SHOWN],
        more_changes=max(0, len(changes) - SHOWN),
        against=sides[0].title,
        folder=str(folder),
    )


def _with_lines(finding: Finding, pair: RecordPair, recordings: Sequence[Recording]) -> Finding:
    """Returns a finding with the lines of both sides where it differs."""
    if finding.answer != "differs":
        return finding
    first, second = recordings
    (ours,) = located([finding], first.ranks, first.sources)
    divergence = finding.divergence
    if divergence and divergence.tensor:
        divergence = replace(divergence, tensor=pair.named_in_second(divergence.tensor))
    (theirs,) = located([replace(finding, divergence=divergence)], second.ranks, second.sources)
    return replace(finding, sites=theirs.sites[:SITES], expected_sites=ours.sites[:SITES])


def _in_place(finding: Finding, sides: tuple[Side, Side], top: Path, revision: Revision | None) -> Finding:
    """Returns a finding whose lines are those of the user's files, and of the revision's, not of their copies."""
    first, second = sides

    def ours(site: CallSite) -> CallSite:
        name = os.path.relpath(site.file, first.work)
        return replace(site, file=f"{revision.name}:{name}") if revision else site

    def theirs(site: CallSite) -> CallSite:
        path = Path(site.file)
        return replace(site, file=str(top / path.relative_to(second.top))) if _is_below(path, second.top) else site

    expected = [ours(site) for site in finding.expected_sites] if revision else []
    return replace(finding, sites=[theirs(site) for site in finding.sites], expected_sites=expected)


def _changes(sides: tuple[Side, Side], revision: Revision, found: Finding | None) -> list[ChangedLines]:
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


def _texts(sides: tuple[Side, Side], names: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
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
    notes = []
    if same:
        notes.append(message("what_was_compared", steps=pair.steps))
    return notes
