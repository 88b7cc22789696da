"""Readers of files that others may have made: no code runs, nothing waits, and the error is one sentence."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from hostile_files import ANY, CANARY, JSON, NPY, NPZ, SAFETENSORS
from samestep.commands.runs import runs
from samestep.data.arrays import Arrays
from samestep.data.windows import Windows
from samestep.errors import TrainingFailed, UserError
from samestep.rank.weights import model_with_weights, save
from samestep.records.arrays import read_arrays, write_arrays
from samestep.records.files import SCHEMA, read
from samestep.records.record import Progress
from samestep.world.regular_files import NotRegular, open_regular, read_regular

SOURCES = Path(__file__).parents[1] / "src" / "samestep"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.rglob(CANARY))


def planted(make: Callable[[Path], None], name: str) -> Path:
    path = Path(name).absolute()
    make(path)
    return path


@pytest.mark.parametrize("kind", [*ANY, *JSON])
def test_a_record_is_read_or_is_one_sentence(kind: str) -> None:
    path = planted((ANY | JSON)[kind], "study.json")
    with pytest.raises((UserError, OSError)) as raised:
        read(Progress, path)
    assert "study.json" in str(raised.value) and len(str(raised.value)) < 600
    (listed,) = runs(path.parent) if path.exists() else runs_beside(path)
    assert listed.outcome == "unknown" and listed.reason


def runs_beside(path: Path) -> list[object]:
    """A link to nothing is no folder of results."""
    assert runs(path.parent) == []
    return [type("Listed", (), {"outcome": "unknown", "reason": "absent"})]


def test_a_record_that_is_as_expected_is_read() -> None:
    for begin in (b"", b"\xef\xbb\xbf", b" \n"):
        Path("progress.json").write_bytes(begin + b'{"schema": %d, "phase": "train", "loss": "NaN"}' % SCHEMA)
        assert read(Progress, Path("progress.json")).phase == "train"
    Path("linked.json").symlink_to("progress.json")
    assert read(Progress, Path("linked.json")).phase == "train"


@pytest.mark.parametrize("kind", [*ANY, *NPZ])
def test_arrays_of_a_record_are_read_or_are_one_sentence(kind: str) -> None:
    planted((ANY | NPZ)[kind], "rank0.end.npz")
    with pytest.raises(TrainingFailed, match=r"rank0\.end\.npz is missing or incomplete"):
        assert read_arrays(Path(), 0, "end")["a"] is None
    write_arrays(Path("rank1.end.npz"), {"a": np.arange(3)})
    assert read_arrays(Path(), 1, "end")["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", [*ANY, *NPY])
def test_arrays_of_a_job_are_mapped_or_are_one_sentence(kind: str) -> None:
    path = planted((ANY | NPY)[kind], "tokens.npy")
    for build in (lambda: Windows(path, 2), lambda: Arrays([path])):
        with pytest.raises(UserError, match=r"tokens\.npy cannot be mapped"):
            build()


@pytest.mark.parametrize("kind", [*ANY, *SAFETENSORS])
def test_weights_are_loaded_or_are_one_sentence(kind: str) -> None:
    path = planted((ANY | SAFETENSORS)[kind], "weights.safetensors")
    with pytest.raises(UserError, match=r"weights\.safetensors cannot be read as safetensors"):
        model_with_weights(lambda: nn.Linear(2, 1), path)
    save(nn.Linear(2, 1).state_dict(), Path("whole.safetensors"))
    assert isinstance(model_with_weights(lambda: nn.Linear(2, 1), Path("whole.safetensors")), nn.Linear)


def test_only_regular_files_of_bounded_size_are_opened() -> None:
    Path("small").write_bytes(b"12345")
    assert read_regular(Path("small"), 5) == b"12345"
    with pytest.raises(NotRegular, match="5 bytes, more than the 4"):
        open_regular(Path("small"), 4)
    with open_regular(Path("small")) as file:
        assert not os.get_inheritable(file.fileno())
    for kind, named in (("fifo", "a named pipe"), ("socket", "a socket"), ("link to /dev/zero", "a device")):
        with pytest.raises(NotRegular, match=named):
            open_regular(planted(ANY[kind], kind.replace("/", "")))


# Files that are read as they are: those that this command, or the system, has just made, and the user's own programs.
AS_THEY_ARE = {
    "world/cgroup.py": "/proc and /sys",
    "world/checks/infiniband.py": "/sys",
    "world/checks/installation.py": "installed scripts",
    "world/checks/engine_packages.py": "installed packages",
    "world/checks/throttling.py": "/sys",
    "world/checks/torch_build.py": "/proc",
    "world/checks/versions.py": "installed packages",
    "world/connections.py": "a folder, for the short name of a socket in it",
    "world/heartbeat.py": "the launch's own",
    "rank/hardware.py": "/proc",
    "rank/checkpoint_files.py": "a folder or a file that was just written, to sync it",
    "rank/checkpoints.py": "the best weights that this training has just written",
    "rank/weights.py": "the file that was just written, to sync it; one that check_regular has looked at",
    "rank/step_logs.py": "the run's own log, which a continued run appends to",
    "launch/": "the launch's own, and /proc",
    "testing/": "the plugin's own",
    "tasks/fork_server.py": "/dev/null",
    "tasks/eject/": "samestep's own sources, and the job's file",
    "tasks/inspect/": "the job's file, which is a program that the user named",
    "recorder/replay_player.py": "what the ranks of this command have kept",
    "commands/ask_worker.py": "the worker's log",
    "commands/fleet.py": "the doctor's own logs",
    "commands/results_folder.py": "samestep's own sources",
    "records/usage.py": "the samples that this command has written",
    "commands/train_options.py": "one of which is_file is true",
    "data/arrays.py": "one that check_regular has looked at",
    "data/images.py": "one that check_regular has looked at",
    "jobs/digits.py": "a package's data",
    "jobs/charlm.py": "the text that the user named",
    "jobs/imdb.py": "the texts that the user named",
}


ALWAYS = ("read_text", "read_bytes", "safe_open", "load_file", "loadtxt", "fromfile", "memmap")
OPENS = ("open", "os.open", "io.open", "tokenize.open", "Image.open", "np.load", "torch.load")


def readers(text: str) -> Iterator[str]:
    """The calls in a source that read a file by its name."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        modes = [*node.args[1:2], *(word.value for word in node.keywords if word.arg == "mode")]
        writes = any(isinstance(mode, ast.Constant) and str(mode.value).startswith(("w", "a")) for mode in modes)
        writes = writes or (name == "os.open" and "O_RDONLY" not in ast.unparse(node))
        if name.rpartition(".")[2] in ALWAYS or (name in OPENS and not writes):
            yield name


def test_every_other_reader_opens_regular_files_only() -> None:
    found = {str(path.relative_to(SOURCES)): [*readers(path.read_text())] for path in SOURCES.rglob("*.py")}
    ours = ("world/regular_files.py", "records/arrays.py")  # the last one loads what open_regular has opened
    others = {file: calls for file, calls in found.items() if calls and not file.startswith((*ours, *AS_THEY_ARE))}
    assert others == {}, "read it with samestep.world.regular_files"
    unused = [place for place in AS_THEY_ARE if not any(found[file] for file in found if file.startswith(place))]
    assert unused == []


@pytest.mark.parametrize("call", ["open(path)", "path.read_text()", "np.load(path)", "os.open(path, os.O_RDONLY)"])
def test_a_planted_reader_is_found(call: str) -> None:
    assert [*readers(f"def read(path):\n    return {call}\n")] == [call.partition("(")[0]]
    assert [*readers("open(path, 'w'); open(path, mode='ab'); os.open(path, os.O_WRONLY | os.O_CREAT)")] == []
