"""Readers of files that others may have made: no code runs, nothing waits, and the error is one sentence."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from budget import budget
from hostile_files import ANY, CANARY, CODE, JSON, NPY, NPZ, SAFETENSORS
from said import refuses
from samestep.commands.results_folder import write_into
from samestep.commands.runs import runs
from samestep.data.arrays import Arrays, Windows
from samestep.errors import TrainingFailed, UserError
from samestep.launch.monitor_sampler import MonitorSampler
from samestep.launch.rank_logs import cut
from samestep.rank.listeners import Csv
from samestep.rank.weights import model_with_weights, save
from samestep.records.files import SCHEMA, read, replace_text, why_not_writable
from samestep.records.record import Progress
from samestep.records.tensor_files import read_arrays, write_arrays
from samestep.tasks.inspect.load import find
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
        Path("progress.json").write_bytes(begin + b'{"schema": %d, "activity": "run", "loss": "NaN"}' % SCHEMA)
        assert read(Progress, Path("progress.json")).activity == "run"
    Path("linked.json").symlink_to("progress.json")
    assert read(Progress, Path("linked.json")).activity == "run"


@pytest.mark.parametrize("kind", [*ANY, *NPZ])
def test_arrays_of_a_record_are_read_or_are_one_sentence(kind: str) -> None:
    planted((ANY | NPZ)[kind], "rank0.end.npz")
    with pytest.raises(TrainingFailed, match=r"rank0\.end\.npz is missing"):
        assert read_arrays(Path(), 0, "end")["a"] is None
    write_arrays(Path("rank1.end.npz"), {"a": np.arange(3)})
    assert read_arrays(Path(), 1, "end")["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", [*ANY, *NPY])
def test_arrays_of_a_job_are_mapped_or_are_one_sentence(kind: str) -> None:
    path = planted((ANY | NPY)[kind], "tokens.npy")
    for build in (lambda: Windows(path, 2), lambda: Arrays([path])):
        with pytest.raises(UserError, match=r"tokens\.npy cannot"):
            build()


@pytest.mark.parametrize("kind", [*ANY, *SAFETENSORS])
def test_weights_are_loaded_or_are_one_sentence(kind: str) -> None:
    path = planted((ANY | SAFETENSORS)[kind], "weights.safetensors")
    with pytest.raises(UserError, match=r"weights\.safetensors cannot"):
        model_with_weights(lambda: nn.Linear(2, 1), path)
    save(nn.Linear(2, 1).state_dict(), Path("whole.safetensors"))
    assert isinstance(model_with_weights(lambda: nn.Linear(2, 1), Path("whole.safetensors")), nn.Linear)


def _sampled(folder: Path) -> None:
    MonitorSampler(folder).close()


def _logged(folder: Path) -> None:
    log = Csv(folder)
    log.evaluation(1, {"loss": 1.0})
    log.close()


def _cut(folder: Path) -> None:
    (folder / "rank0.log").write_text("long")
    cut(folder / "rank0.log")


PID = os.getpid()
# the file that is written, the link that is in its place or in that of its temporary file, and what writes it
WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "results.json": (f".results.json.{PID}", lambda folder: replace_text(folder / "results.json", "{}")),
    "slurm.sh": ("slurm.sh", lambda folder: write_into(folder, "slurm.sh", "")),
    "weights": (".weights", lambda folder: save(nn.Linear(2, 1).state_dict(), folder / "weights")),
    "rank0.log.1": (".rank0.log.part", _cut),
    "usage.csv": ("usage.csv", _sampled),
    "evaluations.csv": ("evaluations.csv", _logged),
    "": (f".writable-{PID}", why_not_writable),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_link_in_place_of_a_file_that_is_written_changes_no_other(name: str) -> None:
    place, write = WRITERS[name]
    Path("precious").write_text("kept")
    Path("out").mkdir()
    Path("out", place).symlink_to(Path("precious").absolute())
    write(Path("out"))
    assert Path("precious").read_text() == "kept" and not Path("out", name).is_symlink()


def test_a_page_of_a_monitored_command_replaces_a_link() -> None:
    Path("precious").write_text("kept")
    Path("out").mkdir()
    Path("out", "usage.html").symlink_to(Path("precious").absolute())
    command = [sys.executable, "-m", "samestep", "monitor", "--out", "out", "--", "true"]
    os.mkfifo("matplotlibrc")  # which matplotlib would read as its settings, without an end
    assert subprocess.run(command, timeout=budget()).returncode == 0
    assert Path("precious").read_text() == "kept" and "<svg" in Path("out", "usage.html").read_text()
    Path("elsewhere").mkdir()
    Path("elsewhere", "usage.csv").symlink_to(Path("new").absolute())
    done = subprocess.run([*command[:5], "elsewhere", *command[6:]], capture_output=True, text=True, timeout=budget())
    assert done.returncode == 2 and "usage.csv exists" in done.stderr and not Path("new").exists()


def test_a_pickle_of_another_is_no_job() -> None:
    Path("job.pkl").write_bytes(CODE)
    os.chmod(".", 0o755)
    for target in ("job.pkl", "absent/job.pkl"):
        with refuses("job_is_a_pickle", file=target):
            find(target)


def test_only_regular_files_of_bounded_size_are_opened() -> None:
    Path("small").write_bytes(b"12345")
    assert read_regular(Path("small"), 5) == b"12345"
    with pytest.raises(NotRegular, match=r"5 bytes.* 4"):
        open_regular(Path("small"), 4)
    with open_regular(Path("small")) as file:
        assert not os.get_inheritable(file.fileno())
    for kind, named in (("fifo", "a named pipe"), ("socket", "a socket"), ("link to /dev/zero", "a device")):
        with pytest.raises(NotRegular, match=named):
            open_regular(planted(ANY[kind], kind.replace("/", "")))


# Files that are read as they are: those that this command, or the system, has just made, and the user's own programs.
AS_THEY_ARE = {
    "world/resources.py": "/proc and /sys",
    "doctor/probes/interfaces.py": "/sys",
    "doctor/probes/installation.py": "installed scripts and packages, /proc",
    "doctor/probes/host.py": "/sys",
    "world/connections.py": "a folder, for the short name of a socket in it",
    "world/become_worker.py": "samestep's own source",
    "world/heartbeat.py": "the launch's own",
    "reference/files.py": "columns of the job's Arrays, which has opened them",
    "rank/hardware.py": "/proc",
    "rank/checkpoint_files.py": "a folder or a file that was just written, to sync it",
    "rank/checkpoints.py": "the best weights that this training has just written",
    "rank/weights.py": "the file that was just written, to sync it; one that check_regular has looked at",
    "launch/": "the launch's own, and /proc",
    "report/html_pages.py": "the current folder, to return to it",
    "testing/": "the plugin's own",
    "commands/side_environment.py": "installed packages",
    "tasks/fork_server.py": "/dev/null",
    "tasks/life.py": "what the run that the proof lives has just written",
    "tasks/eject/": "samestep's own sources, and the job's file",
    "tasks/inspect/": "the job's file, which is a program that the user named",
    "recorder/batches.py": "what the ranks of this command have kept",
    "recorder/replay_player.py": "what the ranks of this command have kept",
    "commands/ask_worker.py": "the worker's log",
    "doctor/fleet.py": "the doctor's own logs",
    "records/toml_files.py": "samestep's own tables and sentences",
    "commands/results_folder.py": "samestep's own sources",
    "records/monitor.py": "the samples that this command has written",
    "commands/training_options.py": "one of which is_file is true",
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
        writes = any(isinstance(mode, ast.Constant) and str(mode.value).startswith(("w", "a", "x")) for mode in modes)
        writes = writes or (name == "os.open" and "O_RDONLY" not in ast.unparse(node))
        if name.rpartition(".")[2] in ALWAYS or (name in OPENS and not writes):
            yield name


def test_every_other_reader_opens_regular_files_only() -> None:
    found = {str(path.relative_to(SOURCES)): [*readers(path.read_text())] for path in SOURCES.rglob("*.py")}
    ours = ("world/regular_files.py", "records/tensor_files.py")  # the last one loads what open_regular has opened
    others = {file: calls for file, calls in found.items() if calls and not file.startswith((*ours, *AS_THEY_ARE))}
    assert others == {}, "read it with samestep.world.regular_files"
    unused = [place for place in AS_THEY_ARE if not any(found[file] for file in found if file.startswith(place))]
    assert unused == []


@pytest.mark.parametrize("call", ["open(path)", "path.read_text()", "np.load(path)", "os.open(path, os.O_RDONLY)"])
def test_a_planted_reader_is_found(call: str) -> None:
    assert [*readers(f"def read(path):\n    return {call}\n")] == [call.partition("(")[0]]
    assert [*readers("open(path, 'w'); open(path, mode='ab'); os.open(path, os.O_WRONLY | os.O_CREAT)")] == []
