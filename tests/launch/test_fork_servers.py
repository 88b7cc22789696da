"""Forked workers are as good as new ones: no shared hash seed hides a fault, none outlives its command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from budget import budget, wait_until
from command import JOBS, has_begun
from lane_marks import CHECK, FULL
from samestep.launch.fork_client import SOCKETS

FRESH = {name: value for name, value in os.environ.items() if name != SOCKETS}  # servers of the command's own
OF_A_SET = """
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from samestep import Job, Recipe

def job():
    words = list({f"word {number}" for number in range(24)})  # another order in each process
    labels = torch.tensor([int(word.split()[1]) % 3 for word in words])
    def model():
        torch.manual_seed(0)
        return torch.nn.Linear(24, 3)
    def criterion(output, batch):
        return F.cross_entropy(output, batch.targets)
    return Job(model, criterion, Recipe(torch.optim.SGD, {"lr": 0.1}), TensorDataset(torch.eye(24), labels), 6)
"""


def verify(folder: Path, job: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "samestep", "verify", job, "--engine", "ddp", "--nproc", "2", "--json"]
    env = FRESH | environment
    line = [*command, "--out", str(folder / "out")]
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=budget(60))


@pytest.mark.check
def test_an_order_that_depends_on_the_hash_seed_is_seen(tmp_path: Path) -> None:
    """Ranks and reference come from two servers: from one, all would agree."""
    (tmp_path / "of_a_set.py").write_text(OF_A_SET)
    done = verify(tmp_path, f"{tmp_path}/of_a_set.py")
    (row,) = json.loads(done.stdout)["engines"]
    assert (done.returncode, row["launcher"], row["verdict"]) == (1, "fork", "differs")
    assert row["first_divergence"]["quantity"] == "tensors received"


PARENT = """
import os
from pathlib import Path
from jobs import quick

def job():
    if "RANK" in os.environ:
        line = Path(f"/proc/{os.getppid()}/cmdline").read_text()
        Path(__file__).with_name(f"parent{os.environ['RANK']}").write_text(line)
    return quick()
"""


STARTS_A_THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()\n"


@pytest.mark.parametrize("threads", [pytest.param(0, marks=FULL), pytest.param(1, marks=CHECK)])
def test_a_server_with_a_thread_is_not_forked(threads: int, tmp_path: Path) -> None:
    """What a library starts when it is imported: a fork of it could wait for ever for a lock that the thread held."""
    (tmp_path / "sitecustomize.py").write_text(STARTS_A_THREAD * threads)
    (tmp_path / "tells_its_parent.py").write_text(PARENT)
    path = os.pathsep.join([str(tmp_path), str(JOBS.parent), FRESH.get("PYTHONPATH", "")])
    done = verify(tmp_path, f"{tmp_path}/tells_its_parent.py", PYTHONPATH=path)
    (row,) = json.loads(done.stdout)["engines"]
    assert (done.returncode, row["verdict"]) == (0, "same"), done.stderr
    parents = [path.read_text() for path in tmp_path.glob("parent[01]")]
    assert ["--fork-server" in parent for parent in parents] == [not threads] * 2


def processes_of(folder: Path) -> list[psutil.Process]:
    """Returns the processes that have a folder in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found += [process] if str(folder) in " ".join(process.environ().values()) else []
    return found


TELLS_ITS_LIBRARIES = """
import os, sys
from pathlib import Path
from jobs import quick

def job():
    if "RANK" in os.environ:
        folder = Path(__file__).parent / "told"
        folder.mkdir(exist_ok=True)
        (folder / f"{os.getpid()}").write_text(str("lightning" in sys.modules))
    return quick()
"""


@pytest.mark.check
def test_a_library_is_imported_once_and_for_its_engines_ranks_alone(tmp_path: Path) -> None:
    """Five launches of ranks: all are forked, those of lightning from a process that has it, and nothing is left."""
    pytest.importorskip("lightning")
    (tmp_path / "tells_its_libraries.py").write_text(TELLS_ITS_LIBRARIES)
    path = os.pathsep.join([str(tmp_path), str(JOBS.parent), FRESH.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-m",
        "samestep",
        "verify",
        f"{tmp_path}/tells_its_libraries.py",
        "--json",
        "--out",
        "out",
    ]
    line = [*command, "--engines", "ddp,fabric,lightning", "--nproc", "2", "--also", "3"]
    env = FRESH | {"PYTHONPATH": path}
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=budget(120))
    rows = json.loads(done.stdout)["engines"]
    assert [(row["launcher"], row["verdict"]) for row in rows] == [("fork", "same")] * 3, done.stderr
    told = sorted(path.read_text() for path in (tmp_path / "told").iterdir())
    # The reference; two ranks of ddp and the threads of one process; two ranks and three of each of the other engines.
    assert told == ["False"] * 4 + ["True"] * 10
    assert not processes_of(tmp_path)


@FULL
@pytest.mark.parametrize("code", ["import time\ntime.sleep(1e6)\n", "raise RuntimeError('broken')\n", STARTS_A_THREAD])
def test_a_library_that_does_not_get_ready_is_its_engines_affair(code: str, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    (tmp_path / "lightning.py").write_text(code)
    path = os.pathsep.join([str(tmp_path), FRESH.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "samestep", "verify", f"{JOBS}:quick", "--json", "--out", str(tmp_path / "out")]
    line = [*command, "--engines", "ddp,lightning", "--quick", "--deadline", str(int(budget(10)))]
    env = FRESH | {"PYTHONPATH": path}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=budget(120))
    verdicts = {row["engine"]: row["verdict"] for row in json.loads(done.stdout)["engines"]}
    assert verdicts == {"ddp": "same", "lightning": "failed"}, done.stderr


KILLED = """
import os, signal, time
from samestep.launch import fork_client
with fork_client.running("ranks"):
    (server,) = fork_client._servers.values()
    assert server.is_ready(100)
    for pid in server.pids:
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)
    fork_client.preload(("json.tool",))
    fork_client.wait()
print("goes on")
"""


@pytest.mark.check
def test_a_server_that_was_killed_forks_no_other(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], env=FRESH, capture_output=True, text=True, timeout=budget(60))
    assert done.stdout == "goes on\n", done.stderr


@pytest.mark.check
@pytest.mark.parametrize("victim", ["command", "server"])
def test_whatever_is_killed_nothing_is_left(victim: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "samestep", "run", f"{JOBS}:slow", "--nproc", "2", "--launcher", "fork"]
    code = f"""
import sys
from samestep.launch import fork_client
from samestep.commands.cli import main
sys.argv = {command[2:]!r} + ["--out", {str(tmp_path / "out")!r}]
with fork_client.running("ranks"):
    main()
"""
    parent = subprocess.Popen([sys.executable, "-c", code], env=FRESH, stderr=subprocess.PIPE, text=True)
    processes: list[psutil.Process] = []
    try:
        wait_until(lambda: has_begun(tmp_path / "out") or parent.poll() is not None, "it does not train")
        assert parent.poll() is None, parent.communicate()[1]
        processes = psutil.Process(parent.pid).children(recursive=True)
        assert len(processes) >= 4  # a server, a launcher, two ranks
        (server,) = psutil.Process(parent.pid).children()
        os.kill(parent.pid if victim == "command" else server.pid, signal.SIGKILL)
        parent.wait(budget(60))
        wait_until(lambda: not any(process.is_running() for process in processes), "something is left", imports=20)
        if victim == "server":
            assert parent.returncode == 1 and "Traceback" not in (said := parent.communicate()[1]), said
    finally:
        for process in [*processes, psutil.Process()]:
            if process.pid != os.getpid() and process.is_running():
                process.kill()
        parent.kill()
        parent.wait()
