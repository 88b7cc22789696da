"""Kill something at a random moment, a hundred times, and look for what is left.

    python tests/launch/trials.py --count 100 --seed 0 --out results/endings_…      (minutes; root, for the hosts)

Each trial draws a launcher, a victim (a rank, the launcher, the command itself, or a host's link) and a moment (while
it starts, meets, trains or evaluates, and some milliseconds on). Afterwards: no process of ours is alive some seconds
after the command has ended, found by session and by pid; no port is held; and in the end a next run starts and ends
well. A link that is cut ends the ranks after the group's timeout. A line of trials.jsonl is one trial.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from budget import budget
from cluster.hosts import Hosts
from command import JOBS

SAMESTEP = [sys.executable, "-m", "samestep"]
LAUNCHERS = ("torchrun", "spawn", "mpirun")
MOMENTS = ("start", "meeting", "step", "evaluation")
VICTIMS = ("rank 0", "rank 1", "launcher", "command")
TIMEOUT, LEFT, LONG = 5, 5, 50  # imports of torch: of the group; of what is left; of a trial


@dataclass(frozen=True)
class Trial:
    number: int
    launcher: str
    victim: str
    moment: str
    delay_s: float


def drawn(number: int, seed: int) -> Trial:
    """Every fifth trial cuts a link; the others kill."""
    draw = random.Random(f"{seed}/{number}")
    delay_s = round(draw.uniform(0.0, 0.6), 3)
    moment = draw.choice(MOMENTS)
    if number % 5 == 4:
        return Trial(
            number, draw.choice(("torchrun static", "torchrun c10d")), "link", draw.choice(MOMENTS[1:]), delay_s
        )
    return Trial(number, draw.choice(LAUNCHERS), draw.choice(VICTIMS), moment, delay_s)


def sessions_of(root: int) -> tuple[set[int], set[int]]:
    """The pids of a process and all below it, and their sessions."""
    pids, sessions = {root}, set()
    with suppress(psutil.Error):
        pids |= {child.pid for child in psutil.Process(root).children(recursive=True)}
    for pid in pids:
        with suppress(OSError):
            sessions.add(os.getsid(pid))
    return pids, sessions


def alive(pids: set[int], sessions: set[int]) -> list[str]:
    """Processes among `pids` or in `sessions` that live, as command lines."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            ours = process.pid in pids or os.getsid(process.pid) in sessions
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[:120])
    return found


def reached(out: Path, moment: str) -> bool:
    """Whether the training in `out` has come to `moment`."""
    if moment == "start":
        return True
    folders = [out, *out.glob("machine-*")]
    if moment == "meeting":
        return any(list(folder.glob("pid-rank*")) for folder in folders)
    word = '"done"' if moment == "step" else '"evaluate"'
    for folder in folders:
        with suppress(OSError):
            if word in (folder / "progress.json").read_text():
                return True
    return False


def kill(trial: Trial, out: Path, root: int) -> bool:
    """Kills the trial's victim; False where it is not there (yet, or any more)."""
    victim = root
    if trial.victim == "launcher":
        children = [p for p in psutil.Process(root).children() if "--inspect" not in p.cmdline()]
        if not children:
            return False
        victim = children[0].pid
    elif trial.victim.startswith("rank"):
        path = out / f"pid-rank{trial.victim[-1]}"
        if not path.exists():
            return False
        victim = int(path.read_text().partition("@")[0])
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
        return True
    return False


def conduct(trial: Trial, out: Path, port: int, hosts: Hosts | None) -> dict[str, Any]:
    """Runs one trial. {…trial, hit, code, left, port_held, ended_s}: what it came to."""
    began = time.monotonic()
    job = f"{JOBS}:evaluates_slowly"
    common = ["--out", str(out), "--timeout", f"{budget(TIMEOUT):.0f}"]
    if trial.victim == "link":
        assert hosts
        shape = ["--nnodes", "2", "--nproc", "1", "--master-addr", "h0", "--port", str(port)]
        lines = [["--node-rank", str(i)] if trial.launcher.endswith("static") else [] for i in range(2)]
        started = [
            hosts.start(i, [*SAMESTEP, "run", job, *common, *shape, *lines[i]], **quiet(out, i)) for i in range(2)
        ]
    else:
        ports = [] if trial.launcher == "mpirun" else ["--port", str(port)]
        line = [*SAMESTEP, "run", job, *common, "--nproc", "2", "--launcher", trial.launcher, *ports]
        started = [subprocess.Popen(line, text=True, **quiet(out, 0))]
    pids, sessions, hit, hit_at = set[int](), set[int](), False, 0.0
    arrived: float | None = None
    while any(command.poll() is None for command in started) and time.monotonic() - began < budget(LONG):
        for command in started:
            more = sessions_of(command.pid)
            pids, sessions = pids | more[0], sessions | more[1]
        if arrived is None and reached(out, trial.moment):
            arrived = time.monotonic()
        if not hit and arrived is not None and time.monotonic() - arrived >= trial.delay_s:
            if trial.victim == "link":
                hosts.cut(1)  # type: ignore[union-attr]
                hit = True
            else:
                hit = kill(trial, out, started[0].pid)
            hit_at = time.monotonic()
        time.sleep(0.02)
    ended_at = time.monotonic()
    if trial.victim == "link":
        hosts.mend(1)  # type: ignore[union-attr]
    own = os.getsid(0)
    while True:
        left = alive(pids, sessions - {own})
        held = holding(port, hosts if trial.victim == "link" else None)
        if not (left or held) or time.monotonic() - ended_at > budget(LEFT):
            break
        time.sleep(0.1)
    codes = [command.poll() for command in started]
    for command in started:
        command.kill()
        command.wait()
    said = "".join(path.read_text() for path in sorted(out.parent.glob(f"{out.name}.said*")))
    last = [line for line in said.splitlines() if line.startswith("samestep: ")][-1:]
    return asdict(trial) | {
        "hit": hit,
        "codes": codes,
        "seconds_from_hit_to_end": round(ended_at - hit_at, 2) if hit else None,
        "left": left,
        "ports_held": held,
        "traceback": "Traceback" in said,
        "said": last,
    }


def holding(port: int, hosts: Hosts | None) -> list[int]:
    """The port, if somebody still listens on it; on the hosts every port that somebody listens on."""
    if hosts:
        return [int(at.rpartition(":")[2]) for i in range(2) for at in hosts.listening(i)]
    return [c.laddr.port for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port]


def quiet(out: Path, number: int) -> dict[str, Any]:
    """A session of its own, and its words in a file."""
    said = open(f"{out}.said{number}", "w")  # noqa: SIM115 - the process's own
    return {"stdout": said, "stderr": said, "start_new_session": True}


def good(result: dict[str, Any]) -> bool:
    """Whether a trial left nothing, and ended in time."""
    hung = None in result["codes"]
    return not (result["left"] or result["ports_held"] or result["traceback"] or hung)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    results = run(range(asked.count), asked.seed, asked.out)
    hit = [result for result in results if result["hit"]]
    well = [result for result in results if good(result)]
    summary = f"{len(results)} trials, {len(hit)} hit their victim; {len(well)} left no process, no port, no traceback"
    (asked.out / "summary.txt").write_text(summary + "\n")
    print(summary)
    raise SystemExit(0 if len(well) == len(results) else 1)


def run(numbers: Iterable[int], seed: int, out: Path) -> list[dict[str, Any]]:
    """These trials of `seed`, then one training that must end well."""
    import tempfile

    from samestep.launch.rendezvous_address import free_port

    results = []
    with Hosts(2) as hosts, tempfile.TemporaryDirectory() as folder, open(out / "trials.jsonl", "w") as lines:
        for number in numbers:
            trial = drawn(number, seed)
            result = conduct(trial, Path(folder) / str(number), free_port("127.0.0.1"), hosts)
            results.append(result | {"seed": seed})
            lines.write(json.dumps(results[-1]) + "\n")
            lines.flush()
        line = [*SAMESTEP, "run", f"{JOBS}:quick", "--nproc", "2", "--out", f"{folder}/next"]
        after = subprocess.run(line, capture_output=True, text=True, timeout=budget(100))
        assert after.returncode == 0, after.stderr
    return results


if __name__ == "__main__":
    main()
