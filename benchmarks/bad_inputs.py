"""Bad inputs and odd environments, each through the real command: one sentence and exit 2, or it works.

    python benchmarks/bad_inputs.py [--only WORDS] [--jobs 2] [--out FOLDER]

Each case runs in a folder of its own, with a temporary folder of its own. It fails where the exit code is another than
the table's, where stderr has a traceback or no sentence, where the command does not end in time, where it leaves a
process or a temporary file, and where a refused command changes the folder. `--out` keeps bad_inputs.json, with the
command, exit code, seconds and last line of stderr of each case. Exit 1 where a case fails.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


import fork_servers
from bad_input_table import REFUSED, WORKS, Case
from odd_environments import environments
from samestep.launch.fork_client import SOCKETS
from wrong_files import wrong_files
from wrong_words import wrong_words

IMPORTS = 40  # of torch, that a case may take, when two run at a time
PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 3  # in which what a command has started ends after it


@dataclass
class Outcome:
    """What one case did. wrong: what is not as the table says; empty: nothing."""

    kind: str
    name: str
    command: str
    code: int | None
    seconds: float
    last_line: str
    wrong: list[str] = field(default_factory=list)


def adopt_orphans() -> None:
    """Makes this process the parent of whatever a command leaves behind."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def tried(case: Case, limit_s: float) -> Outcome:
    """Runs one case in new folders, and judges it."""
    home = Path(tempfile.mkdtemp(prefix="bad-input-"))
    home.chmod(0o755)
    folder, temporary = home / (case.folder or "here"), home / "tmp"
    try:
        folder.mkdir()
        temporary.mkdir(mode=0o1777)
        temporary.chmod(0o1777)
        for name, content in case.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return _run(case, folder, temporary, limit_s)
    finally:
        for path in (home, *home.rglob("*")):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o777)
        shutil.rmtree(home, ignore_errors=True)


def _run(case: Case, folder: Path, temporary: Path, limit_s: float) -> Outcome:
    samestep = f"{sys.executable} -m samestep"
    script = case.shell.replace("SAMESTEP", samestep).replace("PYTHON", sys.executable)
    env = {**os.environ, "TMPDIR": str(temporary), "COLUMNS": "200", **case.env}
    for name in ["PYTHONDONTWRITEBYTECODE", *case.unset]:
        if name not in case.env:
            env.pop(name, None)
    if not case.forked and SOCKETS not in case.env:
        env.pop(SOCKETS, None)
    before = listing(folder)
    began = time.monotonic()
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        seconds = time.monotonic() - began
        left = left_processes()
        texts = []
        for stream in (stdout, stderr):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    lines = [line for line in texts[1].splitlines() if line.strip()]
    outcome = Outcome(case.kind, case.name, case.shell, code, round(seconds, 2), lines[-1][:500] if lines else "")
    outcome.wrong = [*judged(case, code, texts), *[f"left a process: {words}" for words in left]]
    if code == 2 and (changed := sorted({*before.items()} ^ {*listing(folder).items()})) and not case.changes:
        outcome.wrong.append(f"changed the folder: {sorted({name for name, _ in changed})[:4]}")
    if "TMPDIR" not in case.env and (
        files := sorted(path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_"))
    ):
        outcome.wrong.append(f"left temporary files: {files[:4]}")
    return outcome


def judged(case: Case, code: int | None, texts: list[str]) -> list[str]:
    """Returns what is wrong with an exit code and the texts on stdout and stderr."""
    wrong = []
    if code is None:
        return ["did not end"]
    if code not in case.codes:
        wrong.append(f"exit code {code}, not {' or '.join(map(str, case.codes))}: {texts[1][-300:]}")
    for text in texts:
        if "Traceback" in text or re.search(r"^\s+File \"", text, re.M):
            wrong.append(f"a traceback: {text[-300:]}")
    said = [line for line in texts[1].splitlines() if line.strip()]
    if code == REFUSED and case.judge_lines:
        sentences = [line for line in said if not PROGRESS.search(line) and not line.startswith("  ")]
        if len(sentences) != 1 or not sentences[0].startswith("samestep: "):
            wrong.append(f"{len(sentences)} lines, not one sentence: {sentences[:3]}")
    if case.says and not any(case.says in text for text in texts):
        wrong.append(f"does not say {case.says!r}: {said[-1:]}")
    return wrong


PROGRESS = re.compile(r"^samestep: (\S.* on \S+: |.* samples a step$|.* ranks share )")


def listing(folder: Path) -> Mapping[str, str]:
    """Returns each path below a folder with its size, or its kind."""
    found = {}
    for path in folder.rglob("*"):
        found[str(path.relative_to(folder))] = "folder" if path.is_dir() else str(path.lstat().st_size)
    return found


def left_processes() -> list[str]:
    """Ends the processes that a command has left, after some seconds. Returns their command lines."""
    until = time.monotonic() + GRACE_S
    while (children := psutil.Process().children(recursive=True)) and time.monotonic() < until:
        _reap()
        time.sleep(0.05)
    words = []
    for child in children:
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                words.append(" ".join(child.cmdline())[:120])
                child.kill()
        except psutil.NoSuchProcess:
            continue
    _reap()
    return words


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def import_s() -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--kind", default="", help="input, or environment")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--again", type=Path, help="an earlier record: run what failed there, or is not in it")
    parser.add_argument("--out", type=Path, help="keep bad_inputs.json in this folder")
    options = parser.parse_args()
    everything = (*wrong_words(), *wrong_files(), *environments())
    chosen = [case for case in everything if options.only in case.name and options.kind in ("", case.kind)]
    known = json.loads(options.again.read_text())["cases"] if options.again else []
    passed = {(row["name"], row["command"]): Outcome(**row) for row in known if not row["wrong"]}
    earlier = [passed[case.name, case.shell] for case in chosen if (case.name, case.shell) in passed]
    chosen = [case for case in chosen if (case.name, case.shell) not in passed]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # also of the fork servers: who writes beside a job is found
    began, measured, load = time.monotonic(), import_s(), os.getloadavg()
    about = {"cores": os.cpu_count(), "load_average_before": load, "import_s": measured, "python": sys.version}
    outcomes = [*earlier]
    with fork_servers.fork_servers(), ProcessPoolExecutor(options.jobs, initializer=adopt_orphans) as pool:
        for future in [pool.submit(tried, case, IMPORTS * max(1.0, measured)) for case in chosen]:
            outcomes.append(future.result())
            if outcomes[-1].wrong:
                print(json.dumps(asdict(outcomes[-1]), indent=1), flush=True)
            if options.out:  # each time: a run that is ended keeps what it has
                keep(options.out, about, outcomes, len(earlier), round(time.monotonic() - began))
    print(json.dumps(summary_of(outcomes, len(earlier), round(time.monotonic() - began))))
    sys.exit(any(outcome.wrong for outcome in outcomes))


def summary_of(outcomes: list[Outcome], earlier: int, seconds: int) -> dict[str, int]:
    return {
        "cases": len(outcomes),
        "inputs": sum(outcome.kind == "input" for outcome in outcomes),
        "environments": sum(outcome.kind == "environment" for outcome in outcomes),
        "refused": sum(outcome.code == REFUSED for outcome in outcomes),
        "worked": sum(outcome.code == WORKS for outcome in outcomes),
        "failed": sum(bool(outcome.wrong) for outcome in outcomes),
        "of_an_earlier_run": earlier,
        "seconds": seconds,
    }


def keep(folder: Path, about: Mapping[str, object], outcomes: list[Outcome], earlier: int, seconds: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    summary = summary_of(outcomes, earlier, seconds)
    raw = {"about": about, "summary": summary, "cases": [asdict(outcome) for outcome in outcomes]}
    (folder / "bad_inputs.json").write_text(json.dumps(raw, indent=1))


if __name__ == "__main__":
    main()
