"""python -m samestep.worker PLAN.json: trains what the plan says and writes files. Here engine, run and record meet.

    python -m samestep.worker PLAN.json               one rank; its place comes from torchrun's environment
    python -m samestep.worker --spawn 2 PLAN.json     starts the ranks itself, with torch.multiprocessing.spawn
    python -m samestep.worker --inspect QUERY.json    a job's sizes and faults, and which engines run here, as JSON
    python -m samestep.worker --eject QUERY.json      a stand-alone script of a job on an engine
    python -m samestep.worker --reference PLAN.json   the reference, for every layout in the plan

A rank leaves `rankR.json` and `rankR.NAME.npz` in the plan's folder, or `error-rankR.json` and an exit code of 1
(2 when the mistake is the user's).
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessException, spawn

from samestep import engine as engines
from samestep.data.same_data import check_alike
from samestep.data.schedule import schedule_of
from samestep.errors import LoadingFailed, LostPeer, Refused, UserError
from samestep.job import Job
from samestep.rank import hardware
from samestep.rank.best_weights import Watch
from samestep.rank.evaluate import evaluate, plain_model
from samestep.rank.graceful_stop import Stop
from samestep.rank.group import meeting_store, process_group
from samestep.rank.membership import hostname, says_lost
from samestep.rank.weights import started_from
from samestep.records.record import SCHEMA, replace_text, tell, write_array, write_json, write_state
from samestep.run import Run
from samestep.tasks.answer import eject_main, inspect_main
from samestep.tasks.inspect.load import build
from samestep.tasks.largest_batch import too_large
from samestep.tasks.play_reference import play_reference
from samestep.tasks.proof_job import Training, proof_job, steps_of
from samestep.world import STARTED_BY, World, places
from samestep.world.orphans import die_with_parent

Plan = dict[str, Any]


def work(plan: Plan, world: World) -> dict[str, Any]:
    """Runs the plan's trainings, one after the other, in one process group. Returns this rank's record."""
    job = build(plan["job"], plan["settings"])
    engine = engines.load(plan["engine"])
    trainings = {}
    # Opened even for one rank, so that no engine's model outlives its group: DDP's destructor can then wait for ever.
    with nullcontext() if engine.LAUNCHERS == ("process",) else process_group(world):
        for step in plan["trainings"]:
            tell(world.rank, Path(plan["out"]), step["as"])
            trainings[step["as"]] = KINDS[step["kind"]](plan, step, job, engine, world)
    return {"trainings": trainings}


def close(plan: Plan) -> None:
    """Lets the plan's engine end what it keeps between trainings."""
    ends: Any = getattr(engines.load(plan["engine"]), "close", None) if "engine" in plan else None
    if ends:
        ends()


def measure(plan: Plan, step: Plan, job: Job, engine: engines.Engine, world: World) -> dict[str, Any]:
    """The job as it is, for some steps, with nothing of ours between them. Comes first: memory only ever peaks."""
    run = Run(job, world, step["steps"])
    _train(engine, job, world, run, plan["engine_settings"])
    return run.observations() | {"peak_memory_bytes": hardware.peak_memory_bytes(world.device)}


def prove(plan: Plan, step: Plan, job: Job, engine: engines.Engine, world: World) -> dict[str, Any]:
    """One training of the proof, observed, with the weights that rank 0 ends with."""
    training = Training(**{field.name: step[field.name] for field in fields(Training)})
    small = proof_job(job, training)
    run = Run(small, world, steps_of(training), observe=True)
    state = _train(engine, small, world, run, step["engine_settings"])
    if world.rank == 0:
        write_state(Path(plan["out"]), world.rank, step["as"], state)
    return run.observations() | _evaluated(small, state, world)


def train(plan: Plan, step: Plan, job: Job, engine: engines.Engine, world: World) -> dict[str, Any]:
    """The whole job, for the user: progress, a final evaluation, and weights.safetensors from rank 0.

    A stop that somebody asks for ends it after a step; then too, there are weights and an evaluation.
    """
    check_alike(job, world)
    whole = schedule_of(job, 1)
    steps = job.epochs * whole.steps_per_epoch
    folder = Path(plan["out"])
    best = tuple(step["best"]) if step["best"] else None
    every = step["every"] if job.evaluation is not None else 0
    watch = Watch(job, world, steps, Path(plan["weights"]), every, best, step["patience"])
    if step["init"]:
        job = replace(job, model=partial(started_from, job.model, Path(step["init"])))

    def progress(done: int, loss: float) -> None:
        seen = whole.rows_of(done)
        tell(world.rank, folder, "train", done=done, steps=steps, samples=seen, loss=loss, curve=watch.curve)

    stop = Stop(world, meeting_store())
    run = Run(job, world, steps, progress=progress if world.rank == 0 else None, stop=stop, watch=watch)
    state = _train(engine, job, world, run, plan["engine_settings"])
    seen = run.observations()
    tell(world.rank, folder, "evaluate")
    if not watch.ended:  # else libraries have taken one step more, which nobody asked for
        watch.add(len(seen["step_s"]), state, last=True)
    facts: Plan = {"peak_memory_bytes": hardware.peak_memory_bytes(world.device), "asked_steps": steps}
    facts["stopped"] = "early" if watch.ended else "asked" if len(seen["step_s"]) < steps else None
    return seen | facts | {"evaluation": watch.evaluated, "curve": watch.curve, "best_at": watch.best_at}


def score(plan: Plan, step: Plan, job: Job, engine: engines.Engine, world: World) -> dict[str, Any]:
    """What the weights in a file come to on the job's evaluation, and the outputs for each of its rows."""
    check_alike(job, world, training=False)
    model = started_from(job.model, Path(step["init"])).to(world.device)
    found = evaluate(job, model, world, predictions=bool(step["predictions"]))
    if found.predictions is not None:
        write_array(Path(step["predictions"]), found.predictions)
    return {"evaluation": found.record()}


def _synced(job: Job, world: World) -> Job:
    """`job`, its BatchNorm layers made torch's SyncBatchNorm where it asks for that and there are others."""
    if not job.sync_batchnorm or world.size == 1:
        return job
    return replace(job, model=lambda: torch.nn.SyncBatchNorm.convert_sync_batchnorm(job.model()))


def _train(engine: engines.Engine, job: Job, world: World, run: Run, settings: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return engine.train(_synced(job, world), world, run, **settings)
    except RuntimeError as error:
        if hardware.is_out_of_memory(error) and run.part:
            error.__traceback__ = None  # whose frames hold what fills the memory
            raise too_large(job, run.part, world) from None
        if "got mixed torch.Tensor and DTensor" in str(error):
            raise Refused(
                "the model calls a part of a sharded unit by itself, so that its parameters are not gathered; shard "
                "the model as one, as in --set-engine units=root"
            ) from error
        # DDP's, and Lightning's word for it:
        if not re.search("finished reduction in the prior iteration|not used in producing the loss", str(error)):
            raise
        names = [name for name, p in job.model().named_parameters() if p.requires_grad]
        numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        unused = ", ".join(names[int(number)] for number in numbers[1].split()[:4]) if numbers else "some parameters"
        raise Refused(f"{unused}: no gradient in a step; freeze such parameters, or leave them out") from error


KINDS: dict[str, Callable[[Plan, Plan, Job, engines.Engine, World], dict[str, Any]]] = {
    "measure": measure,
    "prove": prove,
    "train": train,
    "score": score,
}


def _evaluated(job: Job, state: dict[str, torch.Tensor], world: World) -> dict[str, Any]:
    if job.evaluation is None:
        return {"evaluation": None}
    return {"evaluation": evaluate(job, plain_model(job, state, world), world).record()}


def rank_main(path: str, do: Callable[[Plan, World], dict[str, Any]]) -> None:
    """The life of one rank. Never returns.

    It ends with os._exit once its record is on the disk and the group is closed: gloo's threads abort about one in
    three healthy processes in the interpreter's own exit.
    """
    die_with_parent()
    plan: Plan = json.loads(Path(path).read_text())
    folder = Path(plan["out"])
    rank = places(os.environ)[0]
    _settle_in(folder, rank)
    torch.set_num_threads(1)
    code = 0
    try:
        world = World.from_env(os.environ)
        os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size)}  # libraries know torchrun's names alone
        os.environ |= {"LOCAL_RANK": str(world.local_rank), "LOCAL_WORLD_SIZE": str(world.local_size)}
        record = {"schema": SCHEMA, "rank": world.rank, "world": asdict(world), "threads": torch.get_num_threads()}
        facts = {"host": hostname(), "interface": os.environ.get("GLOO_SOCKET_IFNAME")} | hardware.facts(world.device)
        record |= {"started_at": plan["started_at"], "machine": facts} | do(plan, world)
        close(plan)
        write_json(folder / f"rank{rank}.json", record)
    except BaseException as error:
        code = 2 if isinstance(error, UserError) else 1
        kind = "refused" if isinstance(error, Refused) else "user" if code == 2 else "crash"
        text = str(error).strip()
        told = isinstance(error, (UserError, LostPeer, LoadingFailed))
        message = text if told else f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
        write_json(
            folder / f"error-rank{rank}.json",
            {"rank": rank, "kind": kind, "message": message, "time": time.time(), "traceback": traceback.format_exc()}
            | {"lost_peer": says_lost(error)},
        )
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _settle_in(folder: Path, rank: int) -> None:
    """This rank's own files: its log, which takes all that it prints, its pid, and its stack when somebody asks."""
    for left in (folder / f"rank{rank}.json", folder / f"error-rank{rank}.json"):  # of an attempt before a restart
        left.unlink(missing_ok=True)
    if hasattr(signal, "SIGUSR2"):
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # a wish to stop that comes before there is anything to stop
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if rank == 0 and os.environ.get(STARTED_BY) == "srun":
        (folder / "slurm-step").write_text(f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}")
    replace_text(folder / f"pid-rank{rank}", f"{os.getpid()}@{socket.gethostname()}")
    if hasattr(signal, "SIGUSR1"):  # whoever waits in vain for this rank can ask where it stands
        stacks = open(folder / f"stack-rank{rank}.txt", "w")  # noqa: SIM115 - open as long as the process lives
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        faulthandler.enable(stacks)


def _spawned(local_rank: int, size: int, path: str) -> None:
    os.environ |= {
        "RANK": str(local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        STARTED_BY: "torchrun",
    }
    rank_main(path, work)


def spawn_main(size: int, path: str) -> None:
    """Starts the ranks and waits for them. Reports how each ended as torchrun does, when one failed."""
    ranks = spawn(_spawned, args=(size, path), nprocs=size, join=False)
    try:
        while not ranks.join():
            pass
    except ProcessException as error:
        print(error, file=sys.stderr)
        for rank, process in enumerate(ranks.processes):
            print(f"rank : {rank} (local_rank: {rank})\nexitcode : {process.exitcode}", file=sys.stderr)
        raise SystemExit(1) from None


def main(arguments: list[str]) -> None:
    match arguments:
        case ["--inspect", path]:
            die_with_parent()
            inspect_main(path)
            os._exit(0)  # a thread that the job started must not keep the answer waiting
        case ["--eject", path]:
            die_with_parent()
            eject_main(path)
            os._exit(0)
        case ["--reference", path]:
            rank_main(path, play_reference)
        case ["--spawn", size, path]:
            die_with_parent()
            spawn_main(int(size), path)
        case [path]:
            rank_main(path, work)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
