"""Ranks that tests keep between proofs: each has a deadline, prints its stack at its end, and is killed by its pid."""

from __future__ import annotations

import atexit
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

import fork_servers
import ray_ranks
import serve
from budget import budget
from samestep.launch import stacks
from samestep.launch.fork_client import SOCKETS
from samestep.launch.supervise import clear_stale_locks
from samestep.proof.hypotheses import with_tried_cause
from samestep.proof.judge import judge, judge_by_draws
from samestep.proof.plan import (
    AS_NUMERICS,
    AS_OWN,
    as_played,
    interrupted,
    loop_layout,
    numerics_layout,
    own_dtype_layout,
    trainings,
    without_life,
)
from samestep.proof.resume import JoinedRecord, judge_resumed
from samestep.proof.trace import Expectation
from samestep.records.collectives import CollectivePlan
from samestep.records.files import write
from samestep.records.inspection import EngineFacts
from samestep.records.plan import OWN_DTYPE, Interrupted, LayoutPlan, Plan, ReferencePlan
from samestep.records.record import Record
from samestep.records.results import Verdict
from samestep.world.connections import connect
from samestep.world.mesh import Mesh, parse_mesh

HERE = Path(__file__).parent
SOURCE = HERE.parent / "src"
DEADLINE_IMPORTS = 100  # of torch, for one plan
KEPT_OF_LIBRARIES = 3
# What a fork server imports for an engine. Not Horovod, which is to be imported where its place is known.
LIBRARIES = {
    "accelerate": "accelerate",
    "deepspeed": "deepspeed deepspeed.runtime.zero.muon.muon_optimizer",  # it imports that when it begins to train
    "fabric": "lightning",
    "hf": "transformers.trainer",
    "lightning": "lightning",
}


OWN_SERVER = ExitStack()  # which forks the ranks of this process, where no lane has one for all
atexit.register(OWN_SERVER.close)
# Engines that start no ranks, by their source: importing all of them takes as long as torch.
ENGINES = (SOURCE / "samestep" / "engines").glob("*.py")
ONE_PROCESS = {file.stem for file in ENGINES if 'processes="one"' in file.read_text()}
# Engines that are tried in an environment of their own: a large package, and one that is no longer maintained.
ELSEWHERE = ("fairscale", "ray")


class RanksFailed(Exception):
    """A rank raised, died or overran its deadline; the message holds what it printed."""


class Ranks:
    """`size` ranks that import samestep from `source`, with the library of `engine` imported. A context
    manager; they have ended when it ends.

    imports: what else has been imported once, for all ranks, because the jobs do it and it takes seconds. threads: the
    ranks are threads of one process, a new one for each plan.
    """

    def __init__(
        self, size: int, source: Path = SOURCE, *, engine: str = "", imports: str = "", threads: bool = False
    ) -> None:
        self.size, self.source, self.engine, self.imports, self.threads = size, source, engine, imports, threads
        self._folder = tempfile.TemporaryDirectory(prefix="samestep-ranks-")
        self._ranks: list[tuple[psutil.Process, IO[str]]] = []
        self._count = 0
        self._played: dict[str, Record] = {}

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._folder.cleanup()

    def work(self, plan: Plan | ReferencePlan | CollectivePlan) -> Record:
        """Sends one plan to all ranks, which write into a new folder, and waits for all their records."""
        if not self._ranks:
            self._start()
        self._send_all(signal.SIGCONT)
        self._count += 1
        folder = Path(self._folder.name) / f"plan{self._count}"
        folder.mkdir()
        path = folder / "plan.json"
        write(path, replace(plan, out=str(folder)))
        for _, plans in self._ranks:
            plans.write(f"{type(plan).__name__} {path}\n")
            plans.flush()
        record, until, looks = Record(folder), time.monotonic() + budget(DEADLINE_IMPORTS), 0
        missing = [folder / f"rank{rank}.json" for rank in range(self.size)]
        while missing := [path for path in missing if not path.exists()]:
            time.sleep(0.005)
            looks += 1
            if looks % 20:  # what follows takes a fifth of a core, at each look
                continue
            error = record.error()
            late = time.monotonic() > until
            gone = [r for r, (process, _) in enumerate(self._ranks) if not process.is_running()]
            if error or late or gone:
                output = self._printed()
                raise RanksFailed(error.traceback if error else f"late: {late}, gone: {gone}\n{output}")
        if self.engine != "ray":  # whose one process has the ranks started
            self._send_all(signal.SIGSTOP)  # Horovod's threads take a fifth of a core between two proofs
        return record

    def played(self, plan: ReferencePlan) -> Record:
        """The record of a reference, which is played once for all who ask for it."""
        if str(plan) not in self._played:
            self._played[str(plan)] = self.work(plan)
        return self._played[str(plan)]

    def _start(self) -> None:
        rendezvous = Path(self._folder.name) / f"rendezvous{self._count}"
        address = _horovod_server(self.size) if self.engine == "horovod" else {}
        clear_stale_locks(os.environ)  # of ranks of DeepSpeed that were killed while it compiled
        path = [str(self.source), str(HERE), str(HERE / "mutations")]
        if self.engine == "ray":
            self._ranks = ray_ranks.started(self.size, Path(self._folder.name), path)
            return
        for rank in range(1 if self.threads else self.size):
            environment = os.environ | {
                "PYTHONPATH": ":".join(path),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.size),
                "LOCAL_WORLD_SIZE": str(self.size),
                "SAMESTEP_INIT_METHOD": f"file://{rendezvous}",
                "OMP_NUM_THREADS": "1",
                **{key: text.format(rank=rank) for key, text in address.items()},
            }
            plans, log = (str(Path(self._folder.name) / f"{name}{rank}") for name in ("plans", "log"))
            if not os.path.exists(plans):
                os.mkfifo(plans)
            pipe = os.open(plans, os.O_RDWR)  # both ends: opening waits for nobody, and a write finds a reader
            asked = {"environment": environment, "path": path, "plans": plans, "log": log, "threads": self.threads}
            pid = _forked(f"{LIBRARIES.get(self.engine, '')} {self.imports}".strip(), asked)
            self._ranks.append((psutil.Process(pid), os.fdopen(pipe, "w")))

    def _send_all(self, number: int) -> None:
        for process, _ in self._ranks:
            _send(process, number)

    def _printed(self) -> str:
        """Asks each rank for its stack and kills it. Returns what all ranks have printed."""
        logs = sorted(Path(self._folder.name).glob("log*"))
        before = stacks.sizes(logs)
        self._send_all(signal.SIGUSR1)
        stacks.wait_until_written(before)
        self._kill()
        return "\n".join(path.read_text() for path in logs)

    def _kill(self) -> None:
        for process, plans in self._ranks:
            _send(process, signal.SIGKILL)  # a stopped process, too
            plans.close()
        for process, _ in self._ranks:
            process.wait()
        self._ranks = []


class KeptRanks(ExitStack):
    """Ranks kept between proofs, of each number and library. They have ended when it ends. imports: as for Ranks."""

    def __init__(self, imports: str = "") -> None:
        super().__init__()
        self._imports = imports
        self._kept: dict[tuple[int, str], Ranks] = {}

    def of(self, size: int, engine: str = "", given: Mapping[str, str] | None = None) -> Ranks:
        """`size` ranks to train on; of their own for a library, which may change torch for its whole process."""
        library = engine if engine in (*LIBRARIES, "horovod", "ray") else ""
        key = size, f"{library} {given}" if library == "accelerate" and given else library
        if key not in self._kept:
            # Of few libraries at a time: each rank has its own copy of what it has imported.
            others = [each for each in self._kept if each[1]]
            for each in others[: len(others) - KEPT_OF_LIBRARIES + 1] if library else ():
                self._kept.pop(each).__exit__()
            self._kept[key] = self.enter_context(Ranks(size, engine=library, imports=self._imports))
        return self._kept[key]


def _send(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


@cache
def _fork_server() -> Path:
    """The socket of the process that forks ranks: that of the whole lane, or one of this process's own."""
    lanes = Path(os.environ.get(SOCKETS, "")) / serve.NAME
    if lanes.with_suffix(".pid").exists():
        fork_servers.wait([serve.NAME])
        return lanes
    return OWN_SERVER.enter_context(fork_servers.of_ranks())


def _forked(library: str, rank: Mapping[str, Any]) -> int:
    """Has a new rank forked. Returns its pid."""
    with connect(_fork_server(), budget()) as connection:
        connection.sendall(f"{json.dumps({'libraries': library, **rank})}\n".encode())
        pid = int(connection.makefile().readline() or 0)
    if not pid:
        raise RanksFailed(
            f"{library} or samestep from {rank['path'][0]} cannot be imported; the traceback is on stderr"
        )
    return pid


def _horovod_server(size: int) -> dict[str, str]:
    """Starts what horovodrun starts for its ranks to meet, and returns what it tells them; '{rank}' is to be filled."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()  # a thread of this process; it ends with it
    port = server.start()
    server.init(get_host_assignments(parse_hosts(f"localhost:{size}"), size))
    every = {"SIZE": size, "LOCAL_SIZE": size, "CROSS_RANK": 0, "CROSS_SIZE": 1, "HOSTNAME": "localhost"}
    every |= {"RANK": "{rank}", "LOCAL_RANK": "{rank}", "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo"}
    every |= {"GLOO_TIMEOUT_SECONDS": 86400}  # stopped ranks are not lost ones
    every |= {"GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "GLOO_RENDEZVOUS_PORT": port, "GLOO_IFACE": "lo"}
    return {f"HOROVOD_{key}": str(value) for key, value in every.items()}


def engine_facts(
    engine: str, size: int, settings: Mapping[str, str] | None = None, mesh: str | Mesh = ""
) -> EngineFacts:
    """Inspects an engine on `size` ranks."""
    return _facts(engine, size, tuple((settings or {}).items()), mesh)


def skip_unless_here(engine: str, size: int = 2) -> None:
    """Skips a test of an engine that cannot run on this machine. In CI every engine must."""
    facts = engine_facts(engine, size)
    if not facts.available:
        assert "CI" not in os.environ or engine in ELSEWHERE, facts.reason
        pytest.skip(str(facts.reason))


@cache
def _facts(engine: str, size: int, settings: tuple[tuple[str, str], ...], mesh: str | Mesh) -> EngineFacts:
    from samestep.tasks.inspect.engines import inspect_engines

    arranged = mesh if isinstance(mesh, Mesh) else parse_mesh(mesh)
    every = inspect_engines(("cpu",), size, dict(settings), [engine] if settings else [], arranged)
    return next(facts for facts in every if facts.name == engine)


def reference_plan(
    job: str,
    replicas: int,
    settings: Mapping[str, str] | None = None,
    facts: EngineFacts | None = None,
    also: str = "",
) -> ReferencePlan:
    """The plan of the reference for an engine's layouts; for DDP's where no facts are given.

    also: 'late' for the later epochs, too, 'life' for a whole run, or 'own' for the job's own dtype. A proof has all;
    here they take time.
    """
    facts = facts or engine_facts("ddp", replicas)
    own = own_dtype_layout(facts) if also == OWN_DTYPE else None
    layouts = tuple(layout for layout in (_loop_layout(facts, also=also), numerics_layout(facts), own) if layout)
    return ReferencePlan("", 0.0, job, dict(settings or {}), layouts, steps=8, replicas=replicas)


def _loop_layout(facts: EngineFacts, then: EngineFacts | None = None, also: str = "") -> LayoutPlan:
    layout = loop_layout(facts, then)
    return replace(layout, trainings=tuple(n for n in layout.trainings if n not in {"late", "life"} - {also}))


def proof_plan(
    expectation: Expectation,
    job: str,
    engine: str,
    replicas: int,
    settings: Mapping[str, str] | None = None,
    facts: EngineFacts | None = None,
    own: Expectation | None = None,
) -> Plan:
    """The plan of an engine's proof, in the dtype and at the rate that the reference took."""
    facts = facts or engine_facts(engine, replicas)
    asked = trainings(facts, as_played(expectation), 8, replicas, own_dtype=as_played(own) if own else None)
    return Plan("", 0.0, job, dict(settings or {}), engine, trainings=asked, mesh=facts.mesh)


def prove(
    reference_rank: Ranks,
    ranks: Ranks,
    job: str,
    engine: str,
    settings: Mapping[str, str] | None = None,
    engine_settings: Mapping[str, str] | None = None,
    *,
    complete: bool = False,
    mesh: str = "",
) -> Verdict:
    """The verdict on `engine` over all of `ranks`. complete: with later epochs and the job's own dtype, as `verify`."""
    facts = engine_facts(engine, ranks.size, engine_settings, mesh)
    if complete:
        # Ranks that are threads live no run: they cannot wait for checkpoints.
        loop_plan = _loop_layout(facts, also="late") if ranks.threads else loop_layout(facts)
        own_plan = own_dtype_layout(facts)
        own_plan = without_life(own_plan) if own_plan and ranks.threads else own_plan
        asked = (loop_plan, numerics_layout(facts), own_plan)
        plan = replace(reference_plan(job, ranks.size, settings, facts), layouts=tuple(filter(None, asked)))
        record: Record | None = None

        def judged(reference: Record) -> Verdict:
            """Judges by a reference; the ranks train once, with what the first one has chosen."""
            nonlocal record
            numbers = iter(range(len(plan.layouts)))
            loop, numerics, own = (Expectation(reference, next(numbers)) if layout else None for layout in asked)
            assert loop
            record = record or ranks.work(proof_plan(loop, job, engine, ranks.size, settings, facts, own))
            return judge(loop, record, numerics, own)

        return judge_by_draws(reference_rank.played(plan), judged, reference_rank.played)
    loop, numerics = _expected(reference_rank, reference_plan(job, ranks.size, settings, facts))
    return judge(loop, ranks.work(proof_plan(loop, job, engine, ranks.size, settings, facts)), numerics)


def _expected(reference_rank: Ranks, plan: ReferencePlan) -> tuple[Expectation, Expectation | None]:
    """What an engine's loop is compared with, and its numerics where they are inexact. Each layout is played by itself,
    since many engines share that of their loop; but all in one plan where they would find other learning rates."""
    alone = [Expectation(reference_rank.played(replace(plan, layouts=(layout,))), 0) for layout in plan.layouts]
    if len({each.facts.sgd_lr for each in alone}) > 1:
        together = reference_rank.played(plan)
        alone = [Expectation(together, number) for number in range(len(plan.layouts))]
    return alone[0], alone[1] if len(alone) > 1 else None


def resumed_reference_plan(
    job: str, first: EngineFacts, then: EngineFacts, settings: Mapping[str, str] | None = None
) -> ReferencePlan:
    """The plan of the reference for a training that one engine begins and another one continues."""
    layouts = [_loop_layout(first, then), numerics_layout(first, then)]
    return ReferencePlan(
        "", 0.0, job, dict(settings or {}), tuple(filter(None, layouts)), steps=8, replicas=first.replicas
    )


def resumed(
    reference: Record,
    job: str,
    first: tuple[Ranks, EngineFacts],
    then: tuple[Ranks, EngineFacts],
    settings: Mapping[str, str] | None = None,
    begin: Callable[[Plan, Path], Record] | None = None,
) -> Verdict:
    """The verdict on a training that the first ranks begin and the others continue, from a checkpoint.

    begin: runs the plan of the first launch, whose checkpoints go to a folder; None: the first ranks do, each time.
    """
    (ranks, facts), (other_ranks, other_facts) = first, then
    loop = Expectation(reference, 0)
    asked = [trainings(engine, as_played(loop), 8, facts.replicas) for engine in (facts, other_facts)]
    with tempfile.TemporaryDirectory(prefix="samestep-resume-") as folder:
        parts = Interrupted(folder, "first", facts.replicas != other_facts.replicas)
        plan = Plan("", 0.0, job, dict(settings or {}), facts.name, trainings=interrupted(asked[0], parts))
        began = begin(plan, Path(folder)) if begin else ranks.work(plan)
        rest = interrupted(asked[1], replace(parts, part="rest"))
        continued = other_ranks.work(replace(plan, engine=other_facts.name, trainings=rest))
    numerics = Expectation(reference, 1) if facts.numerics and facts.numerics.lossy else None
    return judge_resumed(loop, JoinedRecord(continued.folder, began), numerics)


def judged(
    reference: Record,
    facts: EngineFacts,
    train: Callable[[Expectation, Expectation | None], Record],
    also: str = "",
    replay: Callable[[ReferencePlan], Record] | None = None,
) -> Verdict:
    """The verdict on what `train` records. reference: of the engine's layouts, in their order. also: as above. replay:
    has the reference try the causes of a difference; None: it is not tried."""
    assert facts.numerics
    is_lossy = facts.numerics.lossy

    def expected(draws: Record) -> tuple[Expectation, Expectation | None, Expectation | None]:
        second = Expectation(draws, 1) if is_lossy or also == OWN_DTYPE else None
        return Expectation(draws, 0), second if is_lossy else None, second if also == OWN_DTYPE else None

    def judge_by(draws: Record) -> Verdict:
        loop, numerics, own = expected(draws)
        return judge(loop, record, numerics, own)

    loop, numerics, own = expected(reference)
    record = train(loop, own)
    verdict = judge_by_draws(reference, judge_by, replay) if replay else judge_by(reference)
    expectations = {"{}": loop, AS_NUMERICS: numerics, AS_OWN: own}
    return with_tried_cause(verdict, expectations, record, "", replay) if replay else verdict
