"""What is opened, created or removed by its name goes through samestep.world.regular_files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src" / "samestep"
OURS = "world/regular_files.py"

# Calls that go past it: where no other user, and no folder from elsewhere, can have put something. file -> (calls, why)
BY_THEMSELVES = {
    "commands/api.py": ("pickled.write_bytes", "a new temporary folder"),
    "commands/compared_sides.py": ("link.unlink", "a copy in a new temporary folder"),
    "commands/exit_codes.py": ("open os.open", "/dev/null"),
    "commands/fix.py": ("folder.unlink shutil.copytree", "the copy in the folder of a check"),
    "commands/revision.py": (
        "(folder / entry.name).symlink_to folder.mkdir folder.rmdir folder.unlink target.chmod target.symlink_to "
        "target.unlink target.write_bytes",
        "a copy in a new temporary folder",
    ),
    "commands/side_environment.py": ("(places / 'samestep_below.pth').write_text", "a new temporary folder"),
    "commands/working_copy.py": (
        "(target / entry.name).symlink_to shutil.copy2 target.mkdir target.parent.mkdir target.symlink_to",
        "the copy of the script's folder: in a new temporary folder, or that of a check, which is new",
    ),
    "data/pipeline.py": ("path.write_text", "the file that the user's program names"),
    "rank/checkpoint_files.py": ("save_file", "remove_file has cleared the place"),
    "rank/step_profile.py": ("running.export_chrome_trace", "remove_file has cleared the place"),
    "rank/weights.py": ("os.chmod save_file", "the temporary file that open_new has created"),
    "recorder/batches.py": ("torch.save", "into memory"),
    "recorder/redirected_writes.py": ("os.makedirs shutil.copyfile", "a new temporary folder"),
    "recorder/replay_saver.py": ("torch.save", "into what open_new has opened"),
    "records/files.py": ("np.save", "into what open_new has opened"),
    "records/tensor_files.py": ("np.savez", "into what open_new has opened"),
    "tasks/eject/runtime/evaluation.py": ("torch.save", "the text of a script, which is the user's"),
    "tasks/eject/runtime/run.py": ("os.replace torch.save", "the text of a script, which is the user's"),
    "tasks/life.py": ("save_file", "a folder that this launch has created"),
    "testing/rank_processes.py": ("folder.mkdir", "a new temporary folder"),
    "testing/run_on_ranks.py": ("shared.mkdir", "pytest's temporary folder"),
    "world/questions.py": ("os.mkfifo os.open", "a named pipe, in a folder for this user alone"),
    "world/connections.py": ("folder.mkdir os.rename", "folders for this user alone, and the sockets in them"),
}

# Methods and functions that change what is on the disk, whosever they are.
CHANGES = {
    *("unlink", "rmdir", "mkdir", "touch", "write_text", "write_bytes", "symlink_to", "hardlink_to", "chmod"),
    *("rmtree", "makedirs", "removedirs", "rename", "renames", "mkfifo", "symlink"),
    *("copyfile", "copy2", "copytree", "copymode", "copystat"),
    *("save_file", "savez", "savez_compressed", "savetxt", "tofile", "export_chrome_trace", "to_csv"),
}
# Those of these modules alone: others have methods of the same name.
OF_MODULES = {
    "os.remove",
    "os.replace",
    "os.link",
    "os.truncate",
    "shutil.move",
    "shutil.copy",
    "np.save",
    "torch.save",
}
READS = ("r", "rb", "rt")


def writers(text: str) -> Iterator[str]:
    """The calls in a source that open to write, create or remove by a name."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in OF_MODULES:  # also where it is handed on
            yield ast.unparse(node)
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        last = name.rpartition(".")[2]
        if last in CHANGES or (last == "replace" and _is_of_a_path(node)):
            yield name
        elif name in ("open", "io.open") or (last == "open" and name.startswith(("path.", "file.", "(", "Path("))):
            mode = _mode(node, 1 if name in ("open", "io.open") else 0)
            if not (isinstance(mode, ast.Constant) and mode.value in READS):
                yield name
        elif name == "os.open" and "O_RDONLY" not in ast.unparse(node):
            yield name


def _mode(call: ast.Call, position: int) -> ast.expr:
    named = [word.value for word in call.keywords if word.arg == "mode"]
    return next(iter([*named, *call.args[position : position + 1]]), ast.Constant("r"))


def _is_of_a_path(call: ast.Call) -> bool:
    """Whether a `replace` with one argument is that of a path: those of texts have two, and so has dataclasses'."""
    return isinstance(call.func, ast.Attribute) and len(call.args) == 1 and not call.keywords


def test_every_writer_goes_through_one_module() -> None:
    found = {str(path.relative_to(SOURCES)): {*writers(path.read_text())} for path in SOURCES.rglob("*.py")}
    found = {file: calls for file, calls in found.items() if calls and file != OURS}
    allowed = {file: calls for file, (calls, _) in BY_THEMSELVES.items()}
    assert {file: " ".join(sorted(calls)) for file, calls in found.items()} == allowed, (
        "open, create and remove it with samestep.world.regular_files"
    )


@pytest.mark.parametrize(
    "call",
    [
        *(
            "open(path, 'w')",
            "open(path, mode='ab')",
            "open(path, mode)",
            "path.open('x')",
            "os.open(path, os.O_WRONLY)",
        ),
        *("path.write_text('')", "path.unlink()", "shutil.rmtree(path)", "path.mkdir()", "os.replace(new, path)"),
        *("new.replace(path)", "path.touch()", "shutil.copyfile(new, path)", "os.truncate(path, 0)", "path.rmdir()"),
        *("save_file(tensors, path)", "torch.save(state, path)", "np.save(path, array)", "path.rename(new)"),
    ],
)
def test_a_planted_writer_is_found(call: str) -> None:
    assert [*writers(f"def write(path):\n    {call}\n")] == [call.partition("(")[0]]


@pytest.mark.parametrize("call", ["open(path)", "open(path, 'rb')", "text.replace('a', 'b')", "replace(record, a=1)"])
def test_a_reader_is_none(call: str) -> None:
    assert [*writers(call)] == []
