"""The plugin with pytest's options, its workers, its debugger and Ctrl-C; and what it costs who does not use it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from budget import wait_until
from samestep.testing import ranks
from testing.runs import PYTEST, environment, interrupt, outcomes, run

HEAD = """
import os, time
from pathlib import Path
import torch.distributed as dist
from samestep.testing import ranks
"""
SOME = """
@ranks(2)
def test_first():
    print("first, here")
    dist.barrier()

@ranks(2)
def test_fails():
    assert dist.get_rank() == 0

@ranks(2)
def test_last():
    pass
"""


@pytest.mark.check
def test_x_k_and_s(tmp_path: Path) -> None:
    """-x ends after the failure; -k chooses; -s prints each line with its rank."""
    done = run(tmp_path, HEAD + SOME, "-x", "-s")
    assert outcomes(done) == {"failed": 1, "passed": 1}
    assert all(f"[rank {rank}] first, here\n" in done.stdout for rank in range(2))
    done = run(tmp_path, HEAD + SOME, "-k", "first or last", "--junitxml=junit.xml", "--strict-markers", "-W", "error")
    assert outcomes(done) == {"passed": 2, "deselected": 1}, done.stdout
    assert 'tests="2"' in (tmp_path / "junit.xml").read_text()


def test_a_mark_of_the_projects_own_is_left_alone(tmp_path: Path) -> None:
    done = run(tmp_path, "import pytest\n\n@pytest.mark.ranks\ndef test_own():\n    pass\n")
    assert outcomes(done) == {"passed": 1}, done.stdout


@pytest.mark.check
def test_xdist(tmp_path: Path) -> None:
    done = run(tmp_path, HEAD + SOME, "-n", "2")
    assert outcomes(done) == {"failed": 1, "passed": 2}
    failures = re.findall(r"^-+ rank (\d) -+$.*?^E +assert (.*?)$", done.stdout, re.M | re.S)
    assert failures == [("1", "1 == 0")], done.stdout


@pytest.mark.check
def test_pdb_debugs_one_rank(tmp_path: Path) -> None:
    one = "\n@ranks(1)\ndef test_one():\n    planted = 41 + dist.get_world_size()\n    assert planted == 0\n"
    done = run(tmp_path, f"{HEAD}{one}\n{SOME}", "--pdb", "-k", "one or first", typed="p 'planted', planted\nq\n")
    assert "('planted', 42)" in done.stdout, done.stdout + done.stderr
    done = run(tmp_path, HEAD + SOME, "--pdb", "-k", "first")
    assert "--pdb and --trace debug one rank, and this test has 2: write @ranks(1) while you debug it" in done.stdout


@pytest.mark.check
def test_ctrl_c_ends_every_rank(tmp_path: Path) -> None:
    source = """
@ranks(2)
def test_sleeps(shared_tmp_path):
    (Path(os.environ["HERE"]) / f"pid{dist.get_rank()}").write_text(str(os.getpid()))
    time.sleep(1000)
"""
    (tmp_path / "test_it.py").write_text(HEAD + source)
    here = {**environment(), "HERE": str(tmp_path)}
    with subprocess.Popen(
        [*PYTEST, "test_it.py"], cwd=tmp_path, env=here, stdout=subprocess.PIPE, text=True
    ) as process:
        files = [tmp_path / f"pid{rank}" for rank in range(2)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), "the ranks have not begun")
        printed = interrupt(process)
    assert process.returncode == 2 and "KeyboardInterrupt" in printed
    for file in files:
        wait_until(lambda file=file: not psutil.pid_exists(int(file.read_text())), "a rank is left")  # type: ignore[misc]


def test_it_costs_nothing_who_does_not_use_it(tmp_path: Path) -> None:
    """Without such a test pytest imports nothing for it; with one, pytest's process does not import torch."""
    shown = "import sys, pytest; pytest.main(sys.argv[1:]); print('LOADED', sorted(sys.modules))"
    (tmp_path / "test_other.py").write_text("def test_nothing():\n    pass\n")
    (tmp_path / "test_ranks.py").write_text("from samestep.testing import ranks\n@ranks(2)\ndef test_it():\n    pass\n")
    found = {}
    for file in ("test_other.py", "test_ranks.py"):
        command = [sys.executable, "-c", shown, "-p", "samestep.testing", "-p", "no:cacheprovider", file]
        done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True)
        assert "1 passed" in done.stdout
        found[file] = set(re.findall(r"'([\w.]+)'", done.stdout.partition("LOADED")[2]))
    ours = {name for name in found["test_other.py"] if name.partition(".")[0] == "samestep"}
    assert ours == {"samestep", "samestep.testing", "samestep.version"}
    assert not {"torch", "numpy"} & (found["test_other.py"] | found["test_ranks.py"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "@ranks takes the number of ranks, as in @ranks(2), or of threads, as in @ranks(threads=8)"),
        ({"processes": 2, "threads": 2}, "@ranks takes the number of ranks"),
        ({"processes": 0}, "@ranks(0): give a whole number of at least 1"),
        ({"threads": "8"}, "@ranks(threads='8'): give a whole number of at least 1"),
        ({"processes": 2, "timeout": -1}, "@ranks(timeout=-1): give a number of seconds above 0"),
        ({"threads": 2, "backend": "nccl"}, "threads have a group of their own; leave backend out"),
    ],
)
def test_a_wrong_argument_is_one_sentence(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=re.escape(says)) as caught:
        ranks(**arguments)  # type: ignore[arg-type]
    assert not caught.value.pytrace


@pytest.mark.check
def test_other_parameters_in_a_rank_are_told(tmp_path: Path) -> None:
    """A parameter that each process computes for itself, as a set's order is."""
    source = """
import pytest

@ranks(1)
@pytest.mark.parametrize("pid", [os.getpid()])
def test_it(pid):
    pass
"""
    done = run(tmp_path, HEAD + source)
    assert "a test's parameters must be the same in every process" in done.stdout


@pytest.mark.check
def test_ranks_that_are_not_forked(tmp_path: Path) -> None:
    """As on a platform where a process that has imported torch cannot be forked."""
    lines = ["from samestep.launch import fork_client", "fork_client.fork = fork_client.start = lambda *_: None"]
    (tmp_path / "conftest.py").write_text("\n".join(lines))
    assert outcomes(run(tmp_path, HEAD + SOME)) == {"failed": 1, "passed": 2}


@pytest.mark.check
def test_a_fixture_of_the_session_that_fails_in_its_teardown(tmp_path: Path) -> None:
    """It ends with the last test on its ranks, which reports it, though a test without ranks follows."""
    source = """
import pytest

@pytest.fixture(scope="session")
def opened():
    yield
    print("torn", os.environ["RANK"])
    assert os.environ["RANK"] == "0"

def test_before():
    pass

@ranks(2)
def test_first(opened):
    pass

def test_between():
    pass

@ranks(2)
def test_last(opened):
    pass

def test_after():
    pass
"""
    done = run(tmp_path, HEAD + source)
    assert outcomes(done) == {"passed": 5, "errors": 1}, done.stdout
    errors = re.findall(r"^_+ ERROR at (\w+) of (\w+) _+$", done.stdout, re.M)
    assert errors == [("teardown", "test_last")]
    assert [done.stdout.count(f"torn {rank}\n") for rank in range(2)] == [1, 1]
