"""The two sides of a comparison: what each of them runs, and its copy of the repository's folder."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from samestep.commands.check import is_command, words_of
from samestep.commands.command_options import CheckOptions
from samestep.commands.revision import Revision
from samestep.commands.setup import check_rank_number
from samestep.commands.working_copy import LEVELS, copy_beside, copy_folder
from samestep.errors import UserError
from samestep.message import message
from samestep.records.redaction import redacted
from samestep.records.script_plan import ScriptPlan


@dataclass(frozen=True)
class SideRun:
    """What one side runs, on `nproc` ranks. title: as it is named. command: that starts the ranks; None: they run the
    script. module: whether the script is a module's name."""

    title: str
    nproc: int
    command: Sequence[str] | None
    script: str
    arguments: tuple[str, ...]
    module: bool


@dataclass(frozen=True)
class Side:
    """A side and its copy. top: of the repository's folder. place: of the working directory in `top`."""

    run: SideRun
    top: Path
    place: Path

    @property
    def work(self) -> Path:
        return self.top / self.place

    @classmethod
    def copied(
        cls, run: SideRun, other_run: SideRun, folder: Path, *, top: Path, started: float, without: Path
    ) -> Side:
        """Copies `top` below a temporary folder, without the folder `without` and what was written since `started`;
        and what either side names above the working directory."""
        place = Path.cwd().resolve().relative_to(top)
        # With the folders above the working directory, which a script may name as '..'.
        above = max(LEVELS - len(place.parts), 0)
        names = ["root", *["folder"] * LEVELS, *top.parts[1:]]
        side = cls(run, Path(folder, *names[-above - 1 :]), place)
        copy_folder(top, side.top, started, without)
        for side_run in (run, other_run):
            copy_beside(ScriptPlan("", started, side_run.script, side_run.arguments, module=side_run.module), side.work)
        _remove_bytecode(side.top)
        return side


def second_run(options: CheckOptions, words: Sequence[str]) -> SideRun:
    """Returns what the working directory's side runs: the words as they are typed."""
    command, script, arguments = words_of(options, words)
    title = shlex.join(redacted(words)) if options.against_command else script
    return SideRun(title, options.nproc, command, script, tuple(arguments), options.module)


def first_run(options: CheckOptions, second: SideRun, revision: Revision | None) -> SideRun:
    """Returns the run of the first side: that of the second side, with the differences that the options name.

    Raises UserError for a script that the revision does not have, and for options that cannot be.
    """
    moved = (options.against or "").partition(":")[2]
    run = second if options.against_command is None else _of_command(options, options.against_command, revision)
    if moved and (run.command or options.against_command):
        raise UserError(message("moved_script_of_a_command", script=moved))
    if options.against_nproc is not None:
        check_rank_number("--against-nproc", options.against_nproc)
        run = replace(run, nproc=options.against_nproc)
    if revision and not run.command:
        place = Path.cwd().resolve().relative_to(revision.top.resolve())
        script = _script_there(run.module, revision, moved or run.script, place, given=bool(moved))
        run = replace(run, script=script)
    titles = [revision.title] if revision else []
    if options.against_command:
        titles.append(run.title)
    elif not revision:
        titles.append(second.script)
    if options.against_nproc is not None:
        titles.append(f"--nproc {run.nproc}")
    if options.packages:
        titles += ["with", *options.packages]
    return replace(run, title=" ".join(titles))


def _of_command(options: CheckOptions, text: str, revision: Revision | None) -> SideRun:
    """Returns what --against-command says, as it would be typed for this command."""
    try:
        words = shlex.split(text)
    except ValueError:  # a quotation mark without its second
        words = []
    module = words[:1] == ["-m"]
    words = words[1:] if module else words
    if not words:
        raise UserError(message("no_command_of_the_other_side"))
    title = shlex.join(redacted([*(["-m"] if module else []), *words]))
    if revision and not module and not is_command(words):  # the script may be in the revision alone
        return SideRun(title, options.nproc, None, words[0], tuple(words[1:]), module)
    return replace(second_run(replace(options, module=module), words), title=title)


def _script_there(module: bool, revision: Revision, script: str, place: Path, *, given: bool) -> str:
    """Returns a script's path in the working directory of a revision's copy. Raises UserError where the revision does
    not have it. given: whether it was given with the revision."""
    if module:
        paths = [place / script.replace(".", "/") / "__main__.py", place / f"{script.replace('.', '/')}.py"]
        is_here = any((revision.top / path).is_file() for path in paths)
        if is_here and not any(path.as_posix() in revision.files for path in paths):
            raise UserError(message("revision_without_script", revision=revision.title, script=script))
        return script
    # As git has it, a path is from the top of the repository; as it is typed for this command, from here.
    script_path = Path(os.path.abspath(script))
    paths = [Path(script)] if given else []
    if script_path.is_relative_to(Path.cwd()):
        paths.append(place / script_path.relative_to(Path.cwd()))
    elif script_path.is_relative_to(revision.top):
        paths.append(script_path.relative_to(revision.top))
    found = next((path for path in paths if path.as_posix() in revision.files), None)
    if found is None:
        raise UserError(message("revision_without_script", revision=revision.title, script=script))
    return os.path.relpath(found, place)


def _remove_bytecode(top: Path) -> None:
    """Removes the links to folders of compiled modules: Python would write those of the copy there."""
    for folder, names, _ in os.walk(top):
        if "__pycache__" in names and (link := Path(folder, "__pycache__")).is_symlink():
            link.unlink()
