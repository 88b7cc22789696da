"""Findings whose fix must suit what is wrong: pasted into a shell as it is, it fixes that and nothing else."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from doctor.probes.row import Row
from doctor.probes.test_probes import ROWS as ALL_ROWS
from samestep.doctor.machine import LaunchInfo
from samestep.doctor.probe import Finding, FleetProbe
from samestep.doctor.probes import PROBES
from samestep.doctor.probes.gpus import Gpus
from samestep.doctor.probes.host import Disks, Folder, Hostname, try_disks
from samestep.doctor.probes.installation import PythonEnvironment, TorchBuild
from samestep.doctor.probes.launch import LaunchVariables
from samestep.doctor.probes.variables import Variables
from samestep.errors import UserError
from samestep.records.files import as_json, from_json
from samestep.world import nvidia

OUT = Folder("/data", 500 << 30, 10**6, 800.0, "")
TMP = Folder("/tmp", 50 << 30, 10**6, 800.0, "")
NO_LARGE_FILE = Folder("/data", 500 << 30, 10**6, 0.0, "EFBIG: File too large")
TREES = "allreduce:tree;allgather:ring"
NO_SIZE = "a launcher's environment variables are incomplete or malformed (no OMPI_COMM_WORLD_SIZE); unset those"
OUTER = ("OMPI_COMM_WORLD_RANK", "SLURM_JOB_ID")
NOT_A_LEVEL = "ValueError: The value of TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL."


def build(**changed: Any) -> TorchBuild:
    given: dict[str, Any] = {
        "torch": "2.13.0",
        "cuda": "13.0",
        "driver": "580.1",
        "gpus": 8,
        "usable": 8,
        "nccl": "2.29",
    }
    return TorchBuild("", **given | changed)


ROWS: list[Row] = [
    (
        "hostname",
        Hostname("h1", (), ("127.0.0.1",), "", "lo", 2),
        "WARN",
        "hostname_is_unknown",
        {},
        "export GLOO_SOCKET_IFNAME=e",
    ),
    (
        "variables",
        Variables({"NCCL_ALGOS": TREES}),
        "WARN",
        "variable_is_misspelt",
        {"near": "NCCL_ALGO"},
        f"unset NCCL_ALGOS; export NCCL_ALGO='{TREES}'",
    ),
    (
        "variables",
        Variables({"NCCL_ALGO": f"{TREES} "}),
        "WARN",
        "variable_has_spaces_or_quotes",
        {},
        f"export NCCL_ALGO='{TREES}'",
    ),
    ("variables", Variables({"NCCL_IB_DISABLE": ""}), "OK", "variable_is_empty", {}, ""),
    (
        "variables",
        Variables({"TORCH_DISTRIBUTED_DEBUG": ""}),
        "FAIL",
        "variable_has_no_such_value",
        {},
        "unset TORCH_DISTRIBUTED_DEBUG",
    ),
    (
        "installation",
        PythonEnvironment("/venv", "", "", ("/a b/torch.py",)),
        "WARN",
        "file_hides_module",
        {},
        "mv '/a b/torch.py' '/a b/t",
    ),
    (
        "launch_variables",
        LaunchVariables(NO_SIZE, {}, "", OUTER),
        "FAIL",
        "launcher_variables_contradict",
        {},
        "unset OMPI_COMM_WORLD_RANK",
    ),
    (
        "launch_variables",
        LaunchVariables(NO_SIZE, {"RANK": "1"}, "", OUTER),
        "FAIL",
        "launcher_variables_contradict",
        {},
        "unset OMPI_COMM_WORLD_RANK",
    ),
    (
        "launch_variables",
        LaunchVariables("RANK=3 is not below", {"RANK": "3"}, "", OUTER),
        "FAIL",
        "launcher_variables_contradict",
        {},
        "unset RANK",
    ),
    ("disk", Disks(NO_LARGE_FILE, TMP), "FAIL", "disk_takes_no_large_file", {}, "ulimit -f unlimited"),
    (
        "disk",
        Disks(OUT, TMP, "/scratch/a b"),
        "WARN",
        "tmpdir_takes_no_file",
        {"used": "/tmp"},
        "mkdir -p '/scratch/a b'",
    ),
    ("gpus", Gpus("no driver", wanted="cuda"), "UNKNOWN", "device_needs_a_gpu", {"device": "cuda"}, ""),
    ("gpus", Gpus("no driver", wanted="auto"), "OK", "no_nvidia_driver", {}, ""),
    ("torch_build", TorchBuild(NOT_A_LEVEL), "FAIL", "torch_does_not_import", {}, "unset TORCH_DISTRIBUTED_DEBUG"),
    (
        "torch_build",
        TorchBuild("", "2.13.0+cpu", wanted="cuda:1"),
        "FAIL",
        "device_needs_a_gpu_driver",
        {},
        "samestep run … --device cpu",
    ),
    (
        "torch_build",
        TorchBuild("", "2.13.0", usable=1, wanted="cuda"),
        "OK",
        "torch_build_on_cpus",
        {},
        "",
    ),  # of another maker
    (
        "torch_build",
        build(usable=2, visible="0,1", nproc=4),
        "FAIL",
        "cuda_visible_devices_leaves_too_few_gpus",
        {"usable": 2, "nproc": 4},
        "unset CUDA_VISIBLE_DEVICES",
    ),
    ("torch_build", build(usable=2, visible="0,1", nproc=2), "OK", "torch_build_on_gpus", {"nccl": "2.29"}, ""),
]


@pytest.mark.parametrize(("probe", "facts", "status", "identity", "fields", "fix"), ROWS)
def test_the_line_fixes_what_is_wrong(
    probe: str, facts: Any, status: str, identity: str, fields: Mapping[str, Any], fix: str
) -> None:
    (finding,) = PROBES[probe].judge({"h0": facts})
    assert (finding.status, finding.why.id, finding.fix.startswith(fix)) == (status, identity, True), finding
    assert fields.items() <= finding.why.fields.items()
    assert bool(finding.fix) == bool(fix)
    assert shlex.split(finding.fix, comments=True) or not fix


def test_a_folder_of_temporary_files_that_python_leaves_aside_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = LaunchInfo(out=str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    assert try_disks(info).refused == str(tmp_path / "missing")
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert try_disks(info).refused == ""


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


HOSTILE = ("; touch CANARY", "'; touch CANARY; '", "$(touch CANARY)", "`touch CANARY`", "\ntouch CANARY", "\x1b[31m")


def with_one_hostile_text(value: Any, hostile: str) -> Iterator[Any]:
    """Yields plain values with something added to one of their texts."""
    if isinstance(value, str):
        yield value + hostile
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from ({**value, key: changed} for changed in with_one_hostile_text(inner, hostile))
            yield {**value, f"{key}{hostile}": inner}
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            for changed in with_one_hostile_text(inner, hostile):
                yield [*value[:number], changed, *value[number + 1 :]]


def hostile_findings(hostile: str) -> Iterator[Finding]:
    """Yields what the probes find in facts of which one text is hostile, as another machine may send them."""
    for name, facts, *_ in [*ALL_ROWS, *ROWS]:
        probe = PROBES[name]
        machines = facts if isinstance(facts, dict) else {"h0": facts}
        for machine, gathered in machines.items():
            for plain in with_one_hostile_text(as_json(gathered), hostile):
                with suppress(
                    UserError, ValueError
                ):  # one of a few words, or an address: the doctor says that it is none
                    changed = {**machines, machine: from_json(probe.facts, plain)}
                    yield from probe.judge(changed["h0"] if isinstance(probe, FleetProbe) else changed)


def what_runs(line: str) -> str:
    """What a shell takes as more than text: a line without its comment and without what is quoted."""
    return re.sub(r"'[^']*'", "", line.replace("'\"'\"'", "").partition("   #")[0])


@pytest.mark.parametrize("hostile", HOSTILE)
def test_text_of_another_machine_runs_nothing_where_the_line_is_pasted(hostile: str) -> None:
    fixes = [finding.fix for finding in hostile_findings(hostile) if finding.fix]
    assert [fix for fix in fixes if not fix.isprintable()] == []
    assert [fix for fix in fixes if "touch" in what_runs(fix)] == []
    assert sum("touch" in fix or "x1b" in fix for fix in fixes) > 15
    assert "touch" in what_runs("ip link set eth0; touch CANARY up   # first")
