"""Machines that leave and join a training: --nnodes MIN:MAX, on hosts with their own networks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from budget import budget, wait_until
from cluster import hosts as hosts_module
from cluster import skip_where
from cluster.hosts import Hosts
from command import JOBS, samestep

pytestmark = pytest.mark.check

JOB = f"{JOBS}:meets_three_times"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    skip_where(hosts_module.missing())
    with Hosts(2) as made:
        yield made


class Machine:
    """A host on which the line of an elastic training was typed."""

    def __init__(self, hosts: Hosts, number: int, out: Path, *more: str) -> None:
        self.said = out.parent / f"said-{number}-{len(list(out.parent.glob('said-*')))}.txt"
        shape = ["--nnodes", "1:2", "--nproc", "1", "--master-addr", "h0", "--checkpoint-every", "1steps"]
        line = [sys.executable, "-m", "samestep", "run", JOB, *shape, "--out", str(out), *more]
        with open(self.said, "w") as said:
            self.command = hosts.start(number, line, stdout=said, stderr=said, start_new_session=True)

    def ends(self) -> tuple[int, str]:
        code = self.command.wait(budget(100))
        return code, self.said.read_text()


def test_a_machine_leaves_and_one_joins(hosts: Hosts, tmp_path: Path) -> None:
    """The second machine is killed, and comes again: two ranks, then one, then two, of one global batch."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    machines = [Machine(hosts, number, out) for number in range(2)]

    def said() -> object:
        return [machine.said.read_text() for machine in machines]

    try:
        wait_until(lambda: (out / "checkpoints/step-5").exists(), "no checkpoint of two machines", said)
        machines[1].command.kill()
        wait_until(lambda: (out / "checkpoints/step-11").exists(), "it did not go on with one", said, imports=90)
        assert json.loads((out / "checkpoints/step-11/manifest.json").read_text())["world_size"] == 1
        other = Machine(hosts, 1, out, "--set", "waits=false")
        code, words = other.ends()
        assert code == 2 and "command differs from" in words, words
        machines.append(Machine(hosts, 1, out))
        ended = [machine.ends() for machine in (machines[0], machines[2])]
    finally:
        for machine in machines:
            machine.command.kill()
            machine.command.wait()
    assert [code for code, _ in ended] == [0, 0], ended
    first = ended[0][1]
    changed = "machines have left or joined: torchrun continues on"
    assert f"{changed} 1 instead" in first and "(restart 1)" in first, first
    assert f"{changed} 2 instead" in first and "(restart 2)" in first, first
    results = json.loads((out / "results.json").read_text())
    assert (results["world_size"], results["steps"]) == (2, 16)
    done = samestep("run", JOB, "--set", "waits=false", "--nproc", "2", out=whole)
    assert done.returncode == 0, done.stderr
    weights, expected = (load_file(folder / "weights.safetensors") for folder in (out, whole))
    assert weights.keys() == expected.keys()
    assert all(abs(weights[name] - expected[name]).max() < 1e-12 for name in expected)
