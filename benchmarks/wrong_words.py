"""The bad inputs of bad_inputs.py: wrong values of each option of each command, wrong files, wrong types in Python."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Iterator
from typing import Any

from bad_input_table import FAILED, QUICK, REFUSED, WORKS, Case
from samestep.commands.cli import app

POSITIONAL = {
    "compare": "quick.py",
    "verify": "quick.py",
    "run": "quick.py",
    "evaluate": "--weights weights.safetensors quick.py",
    "slurm": "--dry-run quick.py",
    "eject": "quick.py",
    "check": "script.py",
    "monitor": "true",
    "diff": "a b",
    "runs": "",
    "doctor": "--quick",
}
PATHS = ("--out", "--init", "--export", "--predictions", "--to", "--resume")
LONG = "x" * 300
VERY_LONG = "y" * 5000


def wrong_words() -> Iterator[Case]:
    yield from _numbers()
    yield from _paths()
    yield from _texts()
    yield from _lines()


def _options() -> Iterator[tuple[str, str, Any]]:
    """Yields each command's name, and each of its options' flags and types."""
    for registered in app.registered_commands:
        assert registered.callback
        command = registered.name or registered.callback.__name__
        for parameter in inspect.signature(registered.callback, eval_str=True).parameters.values():
            kind, info, *_ = parameter.annotation.__origin__, *parameter.annotation.__metadata__
            if type(info).__name__ == "OptionInfo":
                first = info.default if isinstance(info.default, str) else f"--{parameter.name.replace('_', '-')}"
                yield command, first, kind


def _line(command: str, *words: str) -> str:
    return " ".join(filter(None, ["SAMESTEP", command, *map(shlex.quote, words), POSITIONAL.get(command, "")]))


def _numbers() -> Iterator[Case]:
    whole = ("abc", "1.5", "", "-1", "99999999999999999999999")
    real = ("abc", "", "-1", "nan", "inf")
    tried = set()
    for command, flag, kind in _options():
        values = whole if kind in (int, int | None) else real if kind in (float, float | None) else ()
        for value in values[: 2 if flag in tried else None]:
            yield Case("input", f"{command} {flag}={value[:30]}", _line(command, f"{flag}={value}"))
        tried.add(flag)


JOBS = (
    "",
    " ",
    LONG,
    VERY_LONG,
    f"{LONG}.py",
    f"{VERY_LONG}.py:job",
    ".",
    "..",
    "/",
    "/dev/null",
    "~",
    ":",
    "a:b:c",
    "quick.py:",
    ":job",
    "-",
    "a\nb",
    "\x1b[31mred",
    "quick.py:job()",
    "http://example.com/job.py",
)


def _paths() -> Iterator[Case]:
    values = ("", LONG, VERY_LONG, "/proc/nowhere/out", "/dev/null", "/dev/null/out", "taken", "taken/out")
    values = (*values, "~no_such_user/out")
    files = {"quick.py": QUICK, "script.py": "print(1)\n", "weights.safetensors": b"no weights", "taken": "mine"}
    tried = set()
    for command, flag, _ in _options():
        if flag not in PATHS or (command, flag) == ("run", "--to"):
            continue
        for value in values[: 2 if flag in tried else None]:
            name = f"{command} {flag}={value[:30]}"
            yield Case("input", name, _line(command, f"{flag}={value}"), files=files)
        tried.add(flag)
    for command in ("run", "evaluate", "verify", "eject", "slurm"):
        for value in JOBS[: None if command == "run" else 7 if command == "evaluate" else 3]:
            words = ["--weights=weights.safetensors", value] if command == "evaluate" else [value]
            line = " ".join(["SAMESTEP", command, *map(shlex.quote, words)])
            yield Case("input", f"{command} {value[:30]!r}", line, files=files)
    for value in ("", LONG, VERY_LONG, "nowhere", "taken", "/dev/null"):
        yield Case("input", f"runs {value[:30]!r}", f"SAMESTEP runs {shlex.quote(value)}", files=files)
        yield Case("input", f"diff {value[:30]!r}", f"SAMESTEP diff {shlex.quote(value)} .", files=files)
        yield Case("input", f"check {value[:30]!r}", f"SAMESTEP check {shlex.quote(value)}", files={"taken/x": "x"})
        line = f"SAMESTEP evaluate --weights={shlex.quote(value)} quick.py"
        yield Case("input", f"evaluate weights {value[:30]!r}", line)


TEXTS = {
    "--engine": ("nope", "ddp,ddp,nope", ",", " ", VERY_LONG, "ddp fsdp", "ddp;fsdp", "\x1b[31m", "DDP", "ddp\nfsdp"),
    "--engines": ("nope", ",", " ", VERY_LONG, "\x1b[31m", "DDP"),
    "--launcher": ("nope", ",", "all", VERY_LONG, "torchrun,spawn", "\x1b[31m"),
    "--launchers": ("nope", ",", VERY_LONG, "\x1b[31m"),
    "--device": (
        "nope",
        "cuda:99",
        "cuda:",
        "cuda:0,cuda:0",
        ",",
        "meta",
        "CPU",
        "cpu:1",
        VERY_LONG,
        "\x1b",
    ),
    "--set": (
        "lr",
        "=",
        "=1",
        "lr=",
        "lr=abc",
        "lr=nan",
        "nope=1",
        "lr=1\nx",
        f"lr={VERY_LONG}",
        "__class__=1",
        "lr==1",
    ),
    "--set-engine": ("x", "=", "nope.x=1", "x=1", "ddp.nope=1", "ddp.=1", ".x=1", "bucket_mb=abc", "bucket_mb=inf"),
    "--best": ("nope", ":max", "accuracy:up", ":", VERY_LONG),
    "--log": ("nope", ",", "csv,nope", VERY_LONG),
    "--on-nan": ("nope", "", "STOP", VERY_LONG),
    "--checkpoint-every": (
        "x",
        "0steps",
        "-1steps",
        "1",
        "steps",
        "1e9s",
        "1 parsec",
        "nans",
        VERY_LONG,
        "99999999999999999999999steps",
    ),
    "--profile": (
        "x",
        "steps=",
        "steps=5..1",
        "steps=0..1",
        "steps=a..b",
        "steps=-1..2",
        VERY_LONG,
        "steps=1..99999999999999999999",
    ),
    "--to": ("nope", VERY_LONG),
    "--nnodes": ("x", "0", "-1", "2:1", "1:", ":2", "1:2:3", "1.5", "", "99999999999999"),
    "--master-addr": ("no such host", "no-such-host.invalid", "-x", VERY_LONG, "a\nb", "\x1b[31m", "256.256.256.256"),
    "--hosts": (",", "-oProxyCommand=x", "a b;c", "no-such-host.invalid", VERY_LONG, "\x1b[31m"),
    "--interface": ("nope0", "-x", VERY_LONG, "a\nb", "lo lo"),
    "--sizes": ("x", "0:1", "1GiB:1KiB", "-1", "1XiB", "1KiB:", ":", ",", VERY_LONG, "1KiB:2MiB:3"),
    "--dtype": ("nope", ",", "float31", VERY_LONG),
    "--op": ("nope", ",", VERY_LONG),
    "--show": ("nope", ",", VERY_LONG),
    "--backend": ("nope", "nccl", "GLOO", VERY_LONG),
    "--resume-engine": ("nope", ",", "ddp,fsdp", VERY_LONG),
    "--time": ("x", "", "-1", "1:00:00\n#SBATCH --x", "25:61:61", VERY_LONG),
    "--image": ("x",),
    "--claim": ("x",),
}


def _texts() -> Iterator[Case]:
    files = {"quick.py": QUICK, "script.py": "print(1)\n", "weights.safetensors": b"no weights"}
    tried = set()
    for command, flag, kind in _options():
        if kind in (str, str | None, list[str]) and command != "doctor":
            for value in TEXTS.get(flag, ())[: 2 if flag in tried else None]:
                name = f"{command} {flag}={value[:30]!r}"
                line = _line(command, f"{flag}={value}", *(["--nnodes=2"] if flag == "--master-addr" else []))
                yield Case("input", name, line, files=files)
            tried.add(flag)


LINES = """
nope
--nope
run --nope
run quick.py extra
run quick.py --engine
run quick.py --nproc
run --nproc=2 --nproc
verify quick.py --json=yes
check
check --nope script.py
check nowhere.py
check -m no.such.module
check script.py --steps
check --steps 0 script.py
check --launcher srun script.py
monitor
monitor --nope true
monitor no-such-command
monitor ./quick.py
monitor .
diff
diff a
diff a b c
eject
eject quick.py nope
eject quick.py --to quick.py
eject quick.py --to .
evaluate
evaluate quick.py --weights quick.py
slurm quick.py --nodes 0
slurm quick.py --sbatch=--nope
run quick.py --patience 2
run quick.py --best accuracy --evaluate-every 0
run quick.py --best accuracy --evaluate-every 0 --patience 1
run quick.py --export quick.py
run quick.py --export out
run quick.py --init quick.py
run quick.py --init .
run quick.py --init nowhere.safetensors
run quick.py --resume nowhere
run quick.py --resume quick.py
run quick.py --resume .
run quick.py --node-rank 3 --nnodes 2 --master-addr 127.0.0.1
run quick.py --nnodes 2
run quick.py --nnodes 2 --master-addr 127.0.0.1 --hosts a,b
run quick.py --nnodes 1:2 --hosts a,b
run quick.py --hosts a,b --launcher torchrun
run quick.py --master-addr 127.0.0.1
run quick.py --to k8s --json
run quick.py --to k8s --dry-run
run quick.py --to k8s
run quick.py --image x
run quick.py --claim x
run quick.py --dry-run --json
run quick.py --engine ddp --launcher process
run quick.py --engine ddp --device cuda
run quick.py --engine single --engine ddp,fsdp
run quick.py --set lr=0.1 --set lr=0.2
run quick.py --nproc 100000
run quick.py --nproc 9
run quick.py --threads 1000000
verify quick.py --steps 3
verify quick.py --resume-nproc 0
verify quick.py --engines single --nproc 5 --resume-nproc 100
compare quick.py --measured-steps 1
collectives --backend nccl --device cpu
collectives --backend gloo --device cuda:0
collectives --show all_reduce --op broadcast
collectives --seconds 0 --sizes 1TB
engines extra
engines --device nope
engines --device cuda:77
doctor --quick --device nope
doctor --quick nowhere.py
doctor --quick --launcher nope
doctor --quick --nnodes 2
doctor --quick --nproc 0
runs a b
runs quick.py
"""


def _lines() -> Iterator[Case]:
    """Lines that are wrong as a whole: unknown words, options that contradict each other."""
    files = {"quick.py": QUICK, "script.py": "print(1)\n"}
    for line in filter(None, map(str.strip, LINES.splitlines())):
        codes = (FAILED, REFUSED) if line.startswith("doctor") else (REFUSED,)
        keeps = "--sbatch" in line  # the script that Slurm has refused, which the sentence names
        yield Case("input", line, f"SAMESTEP {line}", codes, files=files, changes=keeps)
    line = "SAMESTEP run quick.py --engine single --nproc 3"
    yield Case("input", "ranks that are not used", line, (WORKS,), "--nproc 3 is not used")
