"""Findings whose fix must suit what is wrong: pasted into a shell as it is, it fixes that and nothing else."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from samestep.world import checks, nvidia
from samestep.world.checks import disk, gpus, hostname, installation, launch_variables, torch_build, variables

OUT = disk.Folder("/data", 500 << 30, 10**6, 800.0, "")
TMP = disk.Folder("/tmp", 50 << 30, 10**6, 800.0, "")
NO_LARGE_FILE = disk.Folder("/data", 500 << 30, 10**6, 0.0, "EFBIG: File too large")
TREES = "allreduce:tree;allgather:ring"
NO_SIZE = "a launcher's environment variables are incomplete or malformed (no OMPI_COMM_WORLD_SIZE); unset those"
OUTER = ("OMPI_COMM_WORLD_RANK", "SLURM_JOB_ID")
NOT_A_LEVEL = "ValueError: The value of TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL."


def build(**changed: Any) -> torch_build.Facts:
    given: dict[str, Any] = {"torch": "2.13.0", "cuda": "13.0", "driver": "580.1", "gpus": 8, "seen": 8, "nccl": "2.29"}
    return torch_build.Facts("", **given | changed)


# (check, facts of one machine, status, words of the sentence, the beginning of the line that fixes it)
SEEN: list[tuple[str, Any, str, str, str]] = [
    (
        "hostname",
        hostname.Facts("h1", (), ("127.0.0.1",), "", "lo", 2),
        "WARN",
        "unknown",
        "export GLOO_SOCKET_IFNAME=e",
    ),
    (
        "variables",
        variables.Facts({"NCCL_ALGOS": TREES}),
        "WARN",
        "NCCL_ALGO?",
        f"unset NCCL_ALGOS; export NCCL_ALGO='{TREES}'",
    ),
    ("variables", variables.Facts({"NCCL_ALGO": f"{TREES} "}), "WARN", "spaces", f"export NCCL_ALGO='{TREES}'"),
    ("variables", variables.Facts({"NCCL_IB_DISABLE": ""}), "OK", "ignores", ""),
    (
        "variables",
        variables.Facts({"TORCH_DISTRIBUTED_DEBUG": ""}),
        "FAIL",
        "OFF, INFO",
        "unset TORCH_DISTRIBUTED_DEBUG",
    ),
    (
        "installation",
        installation.Facts("/venv", "", "", ("/a b/torch.py",)),
        "WARN",
        "hides",
        "mv '/a b/torch.py' '/a b/t",
    ),
    ("launch_variables", launch_variables.Facts(NO_SIZE, {}, "", OUTER), "FAIL", "OMPI", "unset OMPI_COMM_WORLD_RANK"),
    (
        "launch_variables",
        launch_variables.Facts(NO_SIZE, {"RANK": "1"}, "", OUTER),
        "FAIL",
        "OMPI",
        "unset OMPI_COMM_WORLD_RANK",
    ),
    (
        "launch_variables",
        launch_variables.Facts("RANK=3 is not below", {"RANK": "3"}, "", OUTER),
        "FAIL",
        "RANK=3",
        "unset RANK",
    ),
    ("disk", disk.Facts(NO_LARGE_FILE, TMP), "FAIL", "no large file", "ulimit -f unlimited"),
    (
        "disk",
        disk.Facts(OUT, TMP, "/scratch/a b"),
        "WARN",
        "no file can be made: Python takes /tmp",
        "mkdir -p '/scratch/a b'",
    ),
    ("gpus", gpus.Facts("no NVIDIA driver here", wanted="cuda"), "UNKNOWN", "--device cuda asks for a GPU", ""),
    ("gpus", gpus.Facts("no NVIDIA driver here", wanted="auto"), "OK", "no NVIDIA driver", ""),
    ("torch_build", torch_build.Facts(NOT_A_LEVEL), "FAIL", "does not import", "unset TORCH_DISTRIBUTED_DEBUG"),
    (
        "torch_build",
        torch_build.Facts("", "2.13.0+cpu", wanted="cuda:1"),
        "FAIL",
        "sees none",
        "samestep run … --device cpu",
    ),
    ("torch_build", torch_build.Facts("", "2.13.0", seen=1, wanted="cuda"), "OK", "", ""),  # of another maker
    ("torch_build", build(seen=2, hidden="0,1", nproc=4), "FAIL", "leaves 2 to 4 ranks", "unset CUDA_VISIBLE_DEVICES"),
    ("torch_build", build(seen=2, hidden="0,1", nproc=2), "OK", "NCCL 2.29", ""),
]


@pytest.mark.parametrize(("check", "facts", "status", "why", "fix"), SEEN)
def test_the_line_fixes_what_is_wrong(check: str, facts: Any, status: str, why: str, fix: str) -> None:
    (found,) = checks.load(check).judge({"h0": facts})
    assert (found.status, why in found.why, found.fix.startswith(fix)) == (status, True, True), found
    assert bool(found.fix) == bool(fix)
    assert shlex.split(found.fix, comments=True) or not fix


def test_a_folder_of_temporary_files_that_python_leaves_aside_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = checks.LaunchInfo(out=str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    assert checks.probe("disk", info).refused == str(tmp_path / "missing")
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert checks.probe("disk", info).refused == ""


@pytest.mark.parametrize(
    ("given", "visible"),
    [(None, 8), ("0,1", 2), ("", 0), ("-1", 0), ("3,9,1", 1), ("GPU-8932f937,GPU-2", 2), ("MIG-1", 1), (" 0, 7", 2)],
)
def test_ranks_are_counted_by_the_gpus_that_are_left(
    given: str | None, visible: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        (tmp_path / "gpus" / str(number)).mkdir(parents=True)
    monkeypatch.setattr(nvidia, "DRIVER", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert (nvidia.count(), nvidia.visible()) == (8, visible)
