"""The documented commands with the values beside theirs, each taken up to the first process that it would start.

    python tests/neighbours.py FOLDER [--whole] < COMMANDS      prints as JSON how many ended how, and what is wrong

Everything runs in this one process: the options are parsed, and the engines, their settings and the mesh are inspected
as a worker does it. --whole: the job, too, and all that is checked before a launch is checked. A command has then come
to a launch or a connection, has printed what it was asked for, or has refused in a sentence with exit code 2. Anything
else is a defect.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import typer

from samestep import engine
from samestep.commands import ask_worker, cli
from samestep.errors import SAID_BY
from samestep.launch import fork_client
from samestep.records.files import read, write
from samestep.records.inspection import ANSWER, MISTAKE, Question
from samestep.tasks.answer import inspect_main
from samestep.tasks.inspect import engines
from samestep.world.mesh import AXES

ENDS = ("launched", "done", "refused")
OF_THIS_PROGRAM = sys.argv[1:]
HUGE = 10**20
NOT_ONE = "dpp"  # no engine, and no axis of a mesh
MODELS = {"JOB": "my_job.py", "NAME": "ddp", "N": "2", "FILE.py": "written.py", "FOLDER": "data", "REV": "HEAD"}
JOB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from samestep import Job, Recipe

def job(lr=0.1, steps=8, max_iters=8, dropout=0.0, data="", length=3, balance="", weighted=True):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    rows = TensorDataset(torch.arange(72.0).reshape(24, 3).sin(), torch.arange(24) % 2)
    return Job(model=model, criterion=lambda output, batch: nn.functional.cross_entropy(output, batch.targets),
               optimizer=Recipe(torch.optim.SGD, {"lr": lr}), train=rows, evaluation=rows, global_batch=8, epochs=1,
               max_steps=steps,
               metrics={"accuracy": lambda output, batch: (output.argmax(1) == batch.targets).float()})

small = job
"""


class Launched(BaseException):
    """The command has come to its first process, connection or wait."""


def launch(*_: Any, **__: Any) -> NoReturn:
    raise Launched


def words_of(command: str) -> list[str]:
    """Returns the words of a documented command, with a small job in the place of an example's, without `samestep`."""
    words = [MODELS.get(word, word) for word in shlex.split(command)[1:]]
    return [re.sub(r"^examples/\S*?\.py|^(charlm|digits)$", "my_job.py", word) for word in words]


def neighbours(words: list[str]) -> Iterator[list[str]]:
    """Yields a command itself, then those in which one number, engine or axis is another, or one option is left out."""
    yield words
    for place, word in enumerate(words):
        if place == 0 or word == "--":
            continue
        option = words[place - 1] if words[place - 1].startswith("--") else ""
        if option or "=" in word:
            for other in others(word, names=option.startswith(("--engine", "--resume-engine", "--mesh"))):
                yield [*words[:place], other, *words[place + 1 :]]
        if word.startswith("-"):
            has_value = place + 1 < len(words) and not words[place + 1].startswith("-")
            yield words[:place] + words[place + 1 + has_value :]


def others(value: str, *, names: bool) -> Iterator[str]:
    """Yields a value with each of its numbers changed; names: and with each of its engines and axes."""
    for found in re.finditer(r"(?<![\w.])\d+", value):
        number = int(found[0])
        for beside in sorted({number - 1, number + 1, 0, HUGE} - {number}):
            yield f"{value[: found.start()]}{beside}{value[found.end() :]}"
    for found in re.finditer(r"[a-z]+", value) if names else ():
        for known in (engine.names(), list(AXES)):
            if found[0] in known:
                for other in (known[(known.index(found[0]) + 1) % len(known)], NOT_ONE):
                    yield f"{value[: found.start()]}{other}{value[found.end() :]}"


class Answered:
    """A worker that has answered."""

    pid = os.getpid()

    def poll(self) -> int:
        return 0


_answers: dict[str, tuple[str, str]] = {}  # question -> (name of the file with its answer, the text)


def answer(arguments: list[str], *_: Any) -> Answered:
    """Answers the question about a job and the engines in this process, each once. Others are not answered."""
    flag, path = arguments[0], Path(arguments[1])
    if flag != "--inspect":
        raise Launched
    whole = "--whole" in OF_THIS_PROGRAM
    asked = read(Question, path)
    if not whole:
        write(path, replace(asked, job=""))
    question = path.read_text()
    if question not in _answers:
        inspect_main(str(path))
        written = next(file for name in (ANSWER, MISTAKE) if (file := path.with_name(name)).exists())
        _answers[question] = written.name, written.read_text()
    name, text = _answers[question]
    if asked.job and name == ANSWER and not whole:  # what follows looks at the job
        raise Launched
    path.with_name(name).write_text(text)
    return Answered()


def outcome(words: list[str]) -> str:
    """Runs a command. Returns one of ENDS, or what is wrong with how it ends."""
    output, errors = io.StringIO(), io.StringIO()
    sys.argv = ["samestep", *words]
    code: Any = None
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            cli.main()
    except Launched:
        return "launched"
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        return traceback.format_exc()
    # The further lines of a sentence are indented.
    said = [line for line in errors.getvalue().splitlines() if not line.startswith("  ")]
    if code == 0 or (code == 1 and output.getvalue()):  # 1: a table says that nothing is proven
        return "done"
    if code == 2 and said and all(line.startswith(SAID_BY) for line in said):
        return "refused"
    return f"exit code {code}: {errors.getvalue() or output.getvalue()}"


def prepare(folder: Path) -> None:
    """Makes a folder with what the documented commands name, and goes there."""
    from safetensors.numpy import save_file

    os.chdir(folder)
    Path("my_job.py").write_text(JOB)
    Path("train.py").write_text("")
    Path("input.txt").write_text("text")
    weights = Path("runs/a/weights.safetensors")
    weights.parent.mkdir(parents=True)
    save_file({}, weights)


def remove_written(kept: Iterable[Path]) -> None:
    for path in {*Path().iterdir(), *Path("runs").iterdir(), *Path("runs/a").iterdir()} - {*kept}:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def main() -> None:
    prepare(Path(OF_THIS_PROGRAM[0]))
    kept = [*Path().iterdir(), *Path("runs").iterdir(), *Path("runs/a").iterdir()]
    ask_worker._start_worker = answer  # type: ignore[assignment]
    fork_client.start = lambda *_: None
    for owner, name in (
        (subprocess.Popen, "__init__"),
        (os, "fork"),
        (socket, "getaddrinfo"),
        (socket, "create_connection"),
        (time, "sleep"),
    ):
        setattr(owner, name, launch)
    threading.excepthook = lambda _: None
    # What is the same in each command of one process is looked up once.
    cli.app = typer.main.get_command(cli.app)  # type: ignore[assignment]
    for module, name in ((engine, "find_spec"), (engines, "version"), (engines, "requires")):
        setattr(module, name, cache(getattr(module, name)))
    tried = list(dict.fromkeys(tuple(given) for line in sys.stdin for given in neighbours(words_of(line))))
    ends: Counter[str] = Counter()
    wrong = {}
    for words in tried:
        end = outcome([*words])
        if end in ENDS:
            ends[end] += 1
        else:
            wrong[shlex.join(words)] = end
        remove_written(kept)
    print(json.dumps({"ends": ends, "wrong": wrong}))


if __name__ == "__main__":
    main()
