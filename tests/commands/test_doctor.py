"""The command `samestep doctor`: its exit code, its report, and its fixes; every fault: plant_faults.py."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from budget import budget
from samestep.commands.doctor import report_of
from samestep.doctor.fleet import LocalMachine
from samestep.doctor.machine import LaunchInfo
from samestep.errors import UserError
from samestep.launch import Machines, rendezvous_address

MPI = {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}  # of two ranks on one machine
BEGINS = ("NCCL_", "GLOO_", "TORCH_")


def doctor(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith((*BEGINS, "OMP_"))}
    line = [sys.executable, "-m", "samestep", "doctor", *options]
    env = clean | {"COLUMNS": "200"} | variables
    return subprocess.run(line, capture_output=True, text=True, timeout=budget(90), env=env)


def found(done: subprocess.CompletedProcess[str], probe: str) -> Mapping[str, Any]:
    (finding,) = [finding for finding in json.loads(done.stdout)["findings"] if finding["probe"] == probe]
    return finding  # type: ignore[no-any-return]


def test_a_fault_is_named_with_the_line_that_fixes_it() -> None:
    done = doctor("--quick", OMP_NUM_THREADS="all", NCCL_SOCKET_IFNAMES="lo")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "OMP_NUM_THREADS=all" in done.stdout
    assert "\n  export OMP_NUM_THREADS=1\n" in done.stdout  # to paste
    shell = "unset NCCL_SOCKET_IFNAMES; export NCCL_SOCKET_IFNAME=lo"
    assert shell in done.stdout
    assert done.stderr == ""


def test_what_is_well_is_counted_and_the_facts_are_kept() -> None:
    done = doctor("--quick", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == int(any(finding["status"] == "FAIL" for finding in report["findings"])), done.stderr
    (host,) = report["machines"]
    assert report["facts"]["cpus"][host]["nproc"] == 2
    assert found(done, "reachability")["status"] == "OK"
    assert "collective" not in report["facts"] and "torch_build" not in report["facts"]


def test_what_another_launcher_has_left_is_unset() -> None:
    """By the prefixes of all launchers' variables, which the probe is given."""
    left = found(doctor("--quick", "--json", OMPI_COMM_WORLD_RANK="0"), "launch_variables")
    assert left["status"] == "FAIL" and left["fix"] == "unset OMPI_COMM_WORLD_RANK", left


@pytest.mark.check
def test_a_held_port_is_found_where_the_ranks_of_a_launcher_would_open_it() -> None:
    """The doctor's own port is another one there. Once it is free, all is well."""
    by_hand = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    by_mpirun = {f"OMPI_COMM_WORLD_{name}": number for name, number in MPI.items()}
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = str(held.getsockname()[1])
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for started in (by_hand, by_mpirun):
            taken = found(doctor("--quick", "--json", **rendezvous, **started), "port")
            assert taken["status"] == "FAIL" and taken["why"]["fields"]["pid"] == os.getpid(), taken
            assert re.fullmatch(r"export MASTER_PORT=(?!" + port + r" )\d+ .*", taken["fix"])
        with pytest.raises(UserError, match=f"process {os.getpid()}"):
            rendezvous_address.check_port(Machines(port=int(port)))  # as every command that starts ranks does
        assert found(doctor("--quick", "--json", "--port", port), "port")["status"] == "FAIL"
    assert found(doctor("--quick", "--json", **rendezvous, **by_mpirun), "port")["status"] == "OK"


def test_contradictory_options_are_a_sentence() -> None:
    done = doctor("--nnodes", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--master-addr" in done.stderr


def test_a_device_or_a_jobs_file_that_does_not_exist_is_refused() -> None:
    done = doctor("--quick", "--device", "foo")
    assert done.returncode == 2 and "--device foo" in done.stderr
    done = doctor("--quick", "--json", "missing.py")
    assert done.returncode == 1 and found(done, "versions")["why"]["id"] == "job_file_is_missing"
    assert found(doctor("--quick", "--json", "digits"), "versions")["status"] == "OK"


@pytest.mark.parametrize(
    ("error", "status"), [(ConnectionError("h1 is lost: closed"), "FAIL"), (OSError("no route"), "UNKNOWN")]
)
def test_a_machine_that_is_lost_fails_and_what_cannot_be_measured_is_unknown(error: OSError, status: str) -> None:
    (finding,) = (report := report_of([("h0", [])], {"links": error}, 0.0)).findings
    assert (finding.probe, finding.status, finding.why.id) == ("links", status, "probe_was_not_measured")
    assert finding.why.fields == {"error": str(error)}
    assert report.failed == (status == "FAIL")


def test_the_port_of_a_trial_is_held_until_a_rank_has_it() -> None:
    machine = LocalMachine("h0", "127.0.0.1", LaunchInfo(nproc=2, master="127.0.0.1"))
    first = machine.free_port()
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", first))
    second = machine.free_port()
    machine.close()
    for port in (first, second):
        socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.check
def test_it_finds_the_interface_that_works() -> None:
    done = doctor("--json", GLOO_SOCKET_IFNAME="eth9")
    assert done.returncode == 1, done.stdout + done.stderr
    (meeting,) = [
        finding
        for finding in json.loads(done.stdout)["findings"]
        # On a busy machine a rank is also slower than the others.
        if (finding["probe"], finding["status"]) == ("collective", "FAIL")
    ]
    assert meeting["why"]["id"] == "ranks_all_reduce_with_other_settings"
    assert meeting["why"]["fields"]["chosen"] == ["GLOO_SOCKET_IFNAME=eth9"]
    assert meeting["fix"].startswith("export GLOO_SOCKET_IFNAME=")
    assert found(done, "engine_packages")["status"] == "OK"
    assert found(done, "torch_build")["status"] == "OK"


@pytest.mark.check
def test_inside_torchrun_one_process_reports() -> None:
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*line, "-m", "samestep", "doctor", "--json", "--quick"], capture_output=True, text=True, timeout=budget(90)
    )
    report = json.loads(done.stdout)
    (host,) = report["machines"]
    assert report["facts"]["machines"][host] == {
        "node": None,
        "nnodes": 1,
        "nproc": 2,
        "master": "127.0.0.1",
        "started_by": "torchrun",
    }
