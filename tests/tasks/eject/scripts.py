"""Writes scripts, starts them where there is no samestep, and compares what they come to with samestep's own."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

import ranks
from ranks import LIBRARIES, SOURCE, _horovod_server, engine_facts
from samestep import engine as engines
from samestep.commands.script_files import write_script
from samestep.tasks.eject import eject

HERE = Path(__file__).parent
LOSS = re.compile(r"evaluation over (\d+) rows, each once: (.*)")


class Came:
    """What a training came to: rank 0's weights, and the means of its evaluation."""

    def __init__(self, weights: Mapping[str, torch.Tensor], means: Mapping[str, float] | None) -> None:
        self.weights, self.means = weights, means

    def check_equal(self, other: Came) -> None:
        """To the last bit."""
        assert self.weights.keys() == other.weights.keys()
        unequal = [name for name, value in self.weights.items() if not torch.equal(value, other.weights[name])]
        assert not unequal
        assert self.means == other.means


def write(
    target: str, engine: str, folder: Path, size: int, settings: Mapping[str, str], mesh: str = "", **chosen: str
) -> Path:
    """Ejects a script into a new folder, with the files that it needs beside it."""
    facts = engine_facts(engine, size, chosen, mesh)
    folder.mkdir(exist_ok=True)
    file = folder / f"script_{engine}.py"
    write_script(eject(target, settings, engine, facts.settings, size, file.name, facts.mesh), file)
    return file


def runtime_of(script: Path) -> Path:
    """The runtime module beside a script."""
    (runtime,) = script.parent.glob("samestep_*.py")
    return runtime


def run_script(script: Path, engine: str, size: int, imports: str = "") -> Came:
    """Starts a script on `size` ranks, samestep hidden from it. imports: modules that they find imported."""
    said = launch(script, [], engine, size, hidden=True, imports=imports)
    return result(script, said)


def result(script: Path, said: str) -> Came:
    """What a script that has ended left, and what it said."""
    found = LOSS.search(said)
    means = (
        {pair.rpartition(" ")[0]: float(pair.rpartition(" ")[2]) for pair in found[2].split(", ")} if found else None
    )
    return Came(torch.load(script.with_name("weights.pt")), means)


def run_own(
    target: str,
    engine: str,
    folder: Path,
    size: int,
    settings: Mapping[str, str],
    imports: str = "",
    mesh: str = "",
    **chosen: str,
) -> Came:
    """Trains and evaluates with samestep itself."""
    asked = {"job": target, "settings": dict(settings), "engine": engine, "mesh": mesh}
    asked["engine_settings"] = dict(engine_facts(engine, size, chosen).settings)
    folder.mkdir(exist_ok=True)
    (folder / "asked.json").write_text(json.dumps(asked))
    launch(
        HERE / "own.py", [str(folder / "asked.json"), str(folder / "came")], engine, size, hidden=False, imports=imports
    )
    came = torch.load(folder / "came")
    return Came(came["weights"], came["means"])


def launch(program: Path, arguments: list[str], engine: str, size: int, *, hidden: bool, imports: str = "") -> str:
    """Runs a program to its end. Returns what its ranks printed; fails where one fails."""
    folder = Path(arguments[0]).parent if not hidden else program.parent
    if engines.load(engine).needs.processes == "ray" and hidden:
        arguments = [str(size)]  # the script starts its ranks itself
    size = 1 if engines.load(engine).needs.processes in ("one", "ray") else size
    log = folder / "log.txt"
    log.write_text("")
    asked = {"program": str(program), "arguments": arguments, "size": size, "folder": str(folder), "log": str(log)}
    asked |= {"environment": _environment(engine, size), "hidden": hidden}
    launcher = _launcher(f"{LIBRARIES.get(engine, '')} {imports}".strip())
    assert launcher.stdin and launcher.stdout
    launcher.stdin.write(f"{json.dumps(asked)}\n")
    launcher.stdin.flush()
    codes = json.loads(launcher.stdout.readline())
    said = log.read_text()
    assert codes == [0] * size, said[-3000:]
    return said


def skip_unless_here(engine: str) -> None:
    """DataParallel does nothing on a CPU, and its script trains there too."""
    if engine != "dataparallel":
        ranks.skip_unless_here(engine)


def _environment(engine: str, size: int) -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = {"RANK": "{rank}", "LOCAL_RANK": "{rank}", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    places |= {"PYTHONPATH": os.pathsep.join([str(SOURCE), str(HERE.parents[1])])}
    if engine == "ray":  # its ranks are new processes, from which samestep is to be hidden too
        places["PYTHONPATH"] = str(HERE / "hides_samestep")
    places |= _horovod_server(size) if engine == "horovod" else {}
    return {**os.environ, **places}


@cache
def _launcher(imports: str) -> subprocess.Popen[str]:
    """A launcher with these modules imported. It ends with this process, and then its stdin does."""
    command = [sys.executable, str(HERE / "launcher.py"), *imports.split()]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=alone, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
