"""Throws hostile peers at the doctor and at the rendezvous of `run`, and counts what they reach.

    python benchmarks/hostile_peers.py [--out FOLDER]      (two minutes; root, iproute2, util-linux)

Each peer is another user (uid 65534) on another host (a network namespace), or such a user at the port of the first
machine. Strangers do not know the doctor's token; insiders do, as a machine of the launch that somebody has taken over.
A pickle or an environment that is executed makes a folder, the canary. A line for each peer: whether its canary is
there, whether the victim hung or printed a traceback, and how it ended. The last rows are controls: torch's own
backend, where the canary must be there, and a healthy machine, which must still be let in. Exit 0 where all is so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from cluster.hosts import Hosts
from hostile_acts import CONTROL, MOST_S, PORT, RENDEZVOUS, TOKEN, canary, insider_machines, insider_requests, strangers

ACTS = Path(__file__).with_name("hostile_acts.py")
STRANGER = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
SAMESTEP = [sys.executable, "-m", "samestep"]
QUICK = ["--nproc", "1", "--master-addr", "h0", "--quick"]


@dataclass(frozen=True)
class Met:
    """One peer and what became of its victim. against: 'first' and 'other' machine of a doctor, 'rendezvous', 'run'."""

    peer: str
    against: str
    executed: bool
    hung: bool
    traceback: bool
    ended: str
    seconds: float


class Scene:
    def __init__(self, hosts: Hosts, folder: str) -> None:
        self.hosts, self.folder = hosts, folder

    def play(self, host: int, part: str, *words: str, stranger: bool = True) -> subprocess.Popen[str]:
        """Starts this file again on a host, as another user."""
        line = [*(STRANGER if stranger else []), sys.executable, str(ACTS), part, self.folder, *words]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return self.hosts.start(host, line, cwd="/", **pipes)

    def command(self, host: int, words: Sequence[str], token: str = TOKEN) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        env = os.environ | {"SAMESTEP_TOKEN": token, "COLUMNS": "200"}
        return self.hosts.start(host, [*SAMESTEP, *words], env=env, cwd=self.folder, **pipes)

    def met(self, peer: str, against: str, said: str, ended: str, began: float, hung: bool = False) -> Met:
        made = Path(canary(self.folder, RENDEZVOUS[0] if peer in (CONTROL, "a raw pickle") else peer))
        if executed := made.exists():
            made.rmdir()
        return Met(peer, against, executed, hung, "Traceback" in said, ended[:200], round(time.monotonic() - began, 1))

    def ends(self, victim: subprocess.Popen[str]) -> tuple[str, bool]:
        """Waits for a victim. Returns what it said, and whether it hung."""
        try:
            return victim.communicate(timeout=MOST_S)[0], False
        except subprocess.TimeoutExpired:
            victim.kill()
            return victim.communicate()[0], True


def against_first(scene: Scene) -> Iterator[Met]:
    """One doctor, all strangers, a crowd, then the healthy machine; a second one among ten insiders."""
    began = time.monotonic()
    first = scene.command(0, ["doctor", "--nnodes", "2", "--timeout", "60", *QUICK])
    wait_for(lambda: any(at.endswith(f":{PORT}") for at in scene.hosts.listening(0)))
    scene.play(1, "attack").communicate(timeout=MOST_S)
    healthy = scene.command(1, ["doctor", "--nnodes", "2", *QUICK])
    (said, hung), (other, _) = scene.ends(first), scene.ends(healthy)
    ended = f"exit {first.returncode}, the healthy machine {healthy.returncode}"
    for peer in ["a crowd of 300", *strangers(scene.folder)]:
        yield scene.met(peer, "first", said + other, ended, began, hung)
    yield Met("control: a healthy machine", "first", False, hung or healthy.returncode != 0, False, ended, 0.0)
    began = time.monotonic()
    first = scene.command(0, ["doctor", "--nnodes", str(len(insider_machines()) + 1), "--timeout", "5", *QUICK])
    wait_for(lambda: any(at.endswith(f":{PORT}") for at in scene.hosts.listening(0)))
    insiders = scene.play(1, "infiltrate")
    said, hung = scene.ends(first)
    insiders.kill()
    colours = "\x1b[31m" in said
    for peer in insider_machines():
        yield scene.met(peer, "first", said + "Traceback" * colours, f"exit {first.returncode}", began, hung)


def against_other(scene: Scene) -> Iterator[Met]:
    """A machine that dials a first one that is none, or that asks for what a doctor never does."""
    path = Path(scene.folder) / "path"
    path.mkdir()
    (path / "sitecustomize.py").write_text(f"import os; os.mkdir({canary(scene.folder, 'PYTHONPATH')!r})")
    poser = scene.play(0, "pose")
    assert poser.stdout and poser.stdout.readline() == "listening\n", poser.communicate()
    victim = scene.play(1, "dial", stranger=False)
    said, hung = scene.ends(victim)
    poser.kill()
    ended = dict(line.split("\t")[1:3] for line in said.splitlines() if line.startswith("ended\t"))
    seconds = dict(line.split("\t")[1::2] for line in said.splitlines() if line.startswith("ended\t"))
    for peer in [*strangers(scene.folder), *insider_requests(scene.folder)]:
        hangs = hung or peer not in ended
        met = scene.met(peer, "other", said, ended.get(peer, "never"), 0.0, hangs)
        yield replace(met, seconds=float(seconds.get(peer, MOST_S)))


def against_rendezvous(scene: Scene) -> Iterator[Met]:
    """One process that opens a rendezvous after the other, and one that writes into each."""
    peers = [*RENDEZVOUS, CONTROL]
    victim, writer = scene.play(0, "join", *peers, stranger=False), scene.play(1, "scribble")
    assert victim.stdin and writer.stdin
    for peer in peers:
        began, said = time.monotonic(), list[str]()
        for line in lines_of(victim):
            said.append(line)
            if line.startswith("listening"):
                print(line.split()[1], peer, file=writer.stdin, flush=True)
                next(written for written in lines_of(writer) if written == "written\n")
                print(file=victim.stdin, flush=True)
            if line.startswith("ended"):
                break
        ended = said[-1].removeprefix("ended\t").strip() if said else ""
        yield scene.met(peer, "rendezvous", "".join(said), ended, began, not said or "ended" not in said[-1])
    for process in (victim, writer):
        process.kill()
        process.wait()


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yields what a process prints; ends it where it prints nothing for too long."""
    assert process.stdout
    with_end = threading.Timer(MOST_S, process.kill)
    with_end.start()
    try:
        yield from iter(process.stdout.readline, "")
    finally:
        with_end.cancel()


def against_run(scene: Scene) -> Iterator[Met]:
    """The whole command, with machines that are numbered by the rendezvous, and with those that may leave and join."""
    for machines in ("2", "1:2"):
        began = time.monotonic()
        writer = scene.play(1, "scribble")
        assert writer.stdin
        next(ready for ready in lines_of(writer) if ready == "ready\n")
        print(PORT, RENDEZVOUS[0], file=writer.stdin, flush=True)
        shape = ["--nnodes", machines, "--nproc", "1", "--master-addr", "h0", "--timeout", "20"]
        said, hung = scene.ends(scene.command(0, ["run", "digits", *shape, "--out", f"{scene.folder}/{machines}"]))
        writer.kill()
        wrote = "written" in writer.communicate()[0]
        last = next(iter(said.strip().splitlines()[-1:]), "") if wrote else "the stranger has not written"
        met = scene.met(RENDEZVOUS[0], "run", said, last, began, hung or not wrote)
        yield replace(met, peer=f"{RENDEZVOUS[0]}, --nnodes {machines}")


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + MOST_S
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began, met = time.monotonic(), list[Met]()
    with tempfile.TemporaryDirectory() as folder, Hosts(2) as hosts:
        Path(folder).chmod(0o777)
        for against in (against_first, against_other, against_rendezvous, against_run):
            for row in against(Scene(hosts, folder)):
                met.append(row)
                print(f"{row.against:<11}{row.peer:<46}{verdict(row):<10}{row.ended.splitlines()[-1][:90]}", flush=True)
    peers = [row for row in met if not row.peer.startswith("control")]
    counts = {what: sum(getattr(row, what) for row in peers) for what in ("executed", "hung", "traceback")}
    controls = [row.executed if "torch" in row.peer else not row.hung for row in met if row.peer.startswith("control")]
    print(
        f"{len(peers)} peers in {time.monotonic() - began:.0f} s: {counts}; controls as they must be: {all(controls)}"
    )
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        record = {"peers": len(peers), **counts, "controls": all(controls), "rows": [asdict(row) for row in met]}
        (options.out / "peers.json").write_text(json.dumps(record, indent=1) + "\n")
    return int(any(counts.values()) or not all(controls))


def verdict(row: Met) -> str:
    return "executed" if row.executed else "HANGS" if row.hung else "TRACEBACK" if row.traceback else "nothing"


if __name__ == "__main__":
    sys.exit(main())
