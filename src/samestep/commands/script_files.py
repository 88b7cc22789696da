"""Writes an ejected script, and the files that it needs beside it."""

from __future__ import annotations

from pathlib import Path

from samestep.errors import UserError, say
from samestep.message import message
from samestep.records.inspection import Script
from samestep.world.regular_files import check_place, make_folder, open_new, read_regular, remove_file


def write_script(script: Script, to: Path) -> None:
    """Writes a script to the file `to`, and its runtime module and the job's files into the folder of it; the job's
    files stay where they are in their own folder. Raises UserError where a file of another content is in the place of
    one of these: none is then written."""
    from samestep.report import language as language  # the sentences of what is said

    files = {to.with_name(name): text.encode() for name, text in script.made.items()}
    if to.parent.resolve() != Path(script.root).resolve():
        for place, source in script.copied.items():
            files[to.parent / place] = _read(Path(source))
    absent = {path: data for path, data in files.items() if not _is_there(path, data)}
    folders = {to.parent / folder for path in absent for folder in [*path.relative_to(to.parent).parents][:-1]}
    for folder in folders:
        check_place(folder, of_a_folder=True)
    target, written = to, list[Path]()
    try:
        for target in sorted(folders):
            make_folder(target)
        for target, data in absent.items():
            with open_new(target) as file:
                written.append(target)
                file.write(data)
    except OSError as error:
        for path in written:
            remove_file(path)
        raise UserError(message("script_file_cannot_be_written", file=target, error=error.strerror)) from None
    for path in written:
        say(message("file_written", file=path))


def _read(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise UserError(message("script_file_cannot_be_read", file=path, error=error.strerror)) from None


def _is_there(path: Path, data: bytes) -> bool:
    """Whether a file is there, with this content. Raises UserError for one with another content, and for what is no
    file."""
    try:
        if not path.is_symlink() and read_regular(path, len(data)) == data:
            return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    raise UserError(message("script_file_has_other_content", file=path))
