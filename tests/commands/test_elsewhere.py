"""What is written for others to start: the training's line holds all that was asked, each number in its place."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from command import samestep
from samestep.commands.command_options import RunOptions
from samestep.commands.machine_options import MachineOptions
from samestep.commands.submit import kubernetes
from samestep.errors import UserError

ASKED = ["--set", "lr=0.1", "--set-engine", "wrap=root", "--evaluate-every", "3", "--best", "loss", "--patience", "2"]


def words(line: str) -> list[str]:
    """Of the `samestep run` in a line of shell."""
    return shlex.split(line.partition("samestep run ")[2])


def test_a_batch_script(tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(b"\2" + bytes(7) + b"{}")  # safetensors without a tensor
    shape = ["--nodes", "3", "--nproc", "2", "--dry-run"]
    done = samestep("slurm", "digits", "--engine", "fsdp", "--init", str(weights), *ASKED, *shape, out=tmp_path / "out")
    assert done.returncode == 0, done.stderr
    asked = ["digits", "--engine", "fsdp", *ASKED[:4], "--init", str(weights), *ASKED[4:]]
    typed = ["--device", "cpu", "--nnodes", "3", "--nproc", "2", "--master-addr", "$master", "--port", "$port"]
    line = done.stdout.replace("\\\n", " ").partition(" &\n")[0]
    assert words(line) == [*asked, *typed, "--out", str(tmp_path / "out")]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("kind", "pods"), [("k8s", ["completions: 3"]), ("kubeflow", ["replicas: 1", "replicas: 2"])])
def test_manifests(kind: str, pods: list[str]) -> None:
    shape = ["--nnodes", "3", "--nproc", "4", "--init", "/data/w.safetensors", "--to", kind, "--image", "x"]
    done = samestep("run", "digits", "--engine", "fsdp", *ASKED, *shape)
    assert done.returncode == 0, done.stderr
    assert [line.strip() for line in done.stdout.splitlines() if line.strip() in pods] == pods
    asked = ["digits", "--engine", "fsdp", *ASKED[:4], "--init", "/data/w.safetensors", *ASKED[4:]]
    lines = [json.loads(line.strip(" -")) for line in done.stdout.splitlines() if "exec samestep run" in line]
    assert [words(line)[: len(asked) + 4] for line in lines] == [[*asked, "--nnodes", "3", "--nproc", "4"]] * len(pods)
    assert done.stdout.count("nvidia.com/gpu: 4\n") == len(pods)


def test_manifests_pass_on_the_other_options_and_refuse_what_they_decide() -> None:
    given = RunOptions(stall_s=0.0, deadline_s=9.0, machines=MachineOptions(nnodes=2, timeout_s=60.0, max_restarts=1))
    (line, _, _) = kubernetes(given.setup("digits"), given, "k8s", "x", "").partition("--nnodes")
    for words in ("--stall 0.0", "--deadline 9.0", "--timeout 60.0", "--max-restarts 1"):
        assert words in line
    machines = {"--hosts": {"hosts": ("a",)}, "--port": {"port": 5}, "--node-rank": {"node_rank": 0}}
    machines["--master-addr"] = {"master_addr": "h"}
    decided = {flag: RunOptions(machines=MachineOptions(**values)) for flag, values in machines.items()}
    decided |= {"--out": RunOptions(out="out"), "--launcher": RunOptions(launcher="torchrun")}
    for flag, wrong in decided.items():
        with pytest.raises(UserError, match=f"^{flag} is decided by"):
            kubernetes(wrong.setup("digits"), wrong, "k8s", "x", "")
