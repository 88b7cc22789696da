"""Launchers are pure: text in, text out."""

from __future__ import annotations

import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from shutil import which

import pytest

from messages import ids as ids_in
from said import refuses, says
from samestep import launch
from samestep.commands.run import check_options
from samestep.errors import UserError
from samestep.launch import Machines, Shape
from samestep.launch.command import private_folder, shell_line
from samestep.message import as_said, message

PROGRAM = ("-m", "samestep.worker", "plan.json")
GOLDEN = Path(__file__).parent / "golden"
ONE = Shape(2, "/runs/a")
SHAPES = {
    "fork": ONE,
    "horovodrun": ONE,
    "mpirun": ONE,
    "mpirun-two-hosts": Shape(4, "/runs/a", Machines(2, master="h1", port=29500, hosts=("h1", "h2"), interface="eth0")),
    "process": ONE,
    "ray": ONE,
    "spawn": ONE,
    "spawn-port": Shape(2, "/runs/a", Machines(port=29500)),
    "srun": Shape(4, "/runs/a", Machines(2, master="n1", port=21234, single_launch=True)),
    "torchrun": ONE,
    "torchrun-restarts": Shape(2, "/runs/a", Machines(max_restarts=3, timeout_s=30)),
    "torchrun-elastic": Shape(
        2, "/runs/a", Machines(3, master="h1", port=29500, max_restarts=9, min_nodes=2, request_digest="f00d")
    ),
    "torchrun-static": Shape(4, "/runs/a", Machines(2, node_rank=1, master="h1", port=29500)),
    "torchrun-c10d": Shape(
        4, "/runs/a", Machines(2, master="h1", port=29500, is_master=True, local_address="10.0.0.1")
    ),
    "torchrun-ipv6": Shape(4, "/runs/a", Machines(2, node_rank=0, master="fd77::10", port=29500)),
}


@pytest.mark.parametrize("case", SHAPES)
def test_plan(case: str) -> None:
    """The golden files hold a word a line; where this Python lies is written as PYTHON."""
    plan = launch.load(case.partition("-")[0]).plan(PROGRAM, SHAPES[case])
    words = [f"{key}={value}" for key, value in plan.env.items()] + list(plan.argv)
    home = str(Path(sys.executable).parent)
    text = "\n".join(words).replace(sys.executable, "PYTHON").replace(home, "BIN") + "\n"
    assert text == (GOLDEN / f"{case}.txt").read_text()


@pytest.mark.parametrize("how", ["link", "open", "file"])
def test_no_other_user_prepares_the_folder_of_temporary_files(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = private_folder()
    assert folder == private_folder() and folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    if how == "link":
        folder.symlink_to(tmp_path)
    elif how == "open":
        folder.mkdir()
        folder.chmod(0o755)
    else:
        folder.touch()
    with pytest.raises(UserError, match=r"folder_is_not_private|TMPDIR"):
        private_folder()


def test_every_launcher_has_a_golden_file() -> None:
    assert {path.stem.partition("-")[0] for path in GOLDEN.glob("*.txt")} == set(launch.names())
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(SHAPES)


def test_the_shell_line_says_the_same_as_the_plan() -> None:
    plan = launch.load("torchrun").plan((*PROGRAM[:2], "a b/plan.json"), ONE)
    assert shlex.split(shell_line(plan))[-len(plan.argv) :] == list(plan.argv)


@pytest.mark.parametrize(
    ("name", "shape", "sentence"),
    [
        ("horovodrun", Shape(2, "/r", Machines(port=29500)), "horovodrun chooses its ports itself"),
        ("ray", Shape(2, "/r", Machines(port=29500)), "TorchTrainer chooses its ports itself"),
        ("torchrun", Shape(2, "/r", Machines(2, master="h1")), "give the same --port on each"),
        ("srun", ONE, "srun's tasks must know the rendezvous port"),
        ("mpirun", Shape(2, "/r", Machines(2, master="h1", port=1)), "give 2 with --hosts h1,h2"),
        ("mpirun", Shape(2, "/r", Machines(2, hosts=("h1", "h2"))), "several machines must know the rendezvous port"),
    ],
)
def test_a_shape_that_a_launcher_cannot_start(name: str, shape: Shape, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        launch.load(name).plan(PROGRAM, shape)


@pytest.mark.parametrize(
    ("machines", "launcher", "sentence"),
    [
        (Machines(max_restarts=1), "spawn", "--max-restarts is an option of torchrun, and spawn starts this training"),
        (Machines(hosts=("h1",)), "torchrun", "leave it out, or add --launcher mpirun"),
        (Machines(min_nodes=1), "spawn", "leave it out|is an option of torchrun"),
        (Machines(max_restarts=1), "torchrun", None),
        (Machines(min_nodes=1), "torchrun", None),
        (Machines(hosts=("h1",)), "mpirun", None),
        (Machines(), "process", None),
    ],
)
def test_an_option_of_another_launcher_is_refused(machines: Machines, launcher: str, sentence: str | None) -> None:
    with pytest.raises(UserError, match=sentence) if sentence else nullcontext():
        check_options(machines, launcher)


def test_an_unknown_launcher_is_named_with_the_nearest() -> None:
    with refuses("no_such_launcher", launcher="torchrn", hint=message("did_you_mean", name="torchrun")):
        launch.load("torchrn")


@pytest.mark.parametrize(
    ("name", "machines", "ids"),
    [
        ("spawn", Machines(2, master="h1"), {"launcher_starts_one_machine", "use_launcher"}),
        ("horovodrun", Machines(2, master="h1"), {"launcher_starts_one_machine", "use_another_engine"}),
        ("srun", Machines(), {"no_slurm_job_here" if which("srun") else "launcher_not_installed"}),
        ("torchrun", Machines(2, single_launch=True), {"torchrun_starts_on_each_machine"}),
    ],
)
def test_why_a_launcher_is_unavailable(name: str, machines: Machines, ids: set[str]) -> None:
    why = as_said(launch.load(name).missing(machines, {}) or "")
    assert ids_in(why) == ids
    if "use_launcher" in ids:
        says(why, "launcher_starts_one_machine", launcher="spawn", machines=2)
        says(why.fields["instead"], "use_launcher", launchers=["torchrun", "mpirun", "srun"])
    assert launch.load("torchrun").missing(Machines(), {}) is None
