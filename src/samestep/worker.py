"""python -m samestep.worker PLAN.json: trains what the plan says and writes files. Here engine, run and record meet.

    python -m samestep.worker PLAN.json               one rank; its place comes from torchrun's environment
    python -m samestep.worker --spawn 2 PLAN.json     starts the ranks itself, with torch.multiprocessing.spawn
    python -m samestep.worker --inspect QUERY.json    a job's sizes and faults, and which engines run here, as JSON
    python -m samestep.worker --reference PLAN.json   the reference, for every layout in the plan

A rank leaves `rankR.json` and `rankR.NAME.npz` in the plan's folder, or `error-rankR.json` and an exit code of 1
(2 when the mistake is the user's).
"""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessException, spawn

from samestep import engine as engines
from samestep import inspection
from samestep.engine import Layout
from samestep.errors import Refused, UserError
from samestep.evaluate import evaluate, plain_model
from samestep.job import Job
from samestep.lifeline import die_with_parent
from samestep.loading import build
from samestep.process_group import process_group
from samestep.proof import Training, proof_job, steps_of
from samestep.record import SCHEMA, write_arrays, write_json
from samestep.run import Run, digest_state
from samestep.world import World

Plan = dict[str, Any]

# What gloo and NCCL say when another rank has left: never the first cause.
LOST_PEER = re.compile(r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|remote process (exited|has terminated)")


def work(plan: Plan, world: World) -> dict[str, Any]:
    """Runs the plan's trainings, one after the other, in one process group. Returns this rank's record."""
    job = build(plan["job"], plan["settings"])
    engine = engines.load(plan["engine"])
    trainings = {}
    # Opened even for one rank, so that no engine's model outlives its group: DDP's destructor can then wait for ever.
    with nullcontext() if engine.LAUNCHERS == ("process",) else process_group(world):
        for step in plan["trainings"]:
            _tell(plan, world, step["name"])
            trainings[step["name"]] = KINDS[step["kind"]](plan, step, job, engine, world)
    return {"layout": asdict(engine.layout(world)), "numerics": asdict(engine.NUMERICS), "trainings": trainings}


def measure(plan: Plan, step: Plan, job: Job, engine: engines.Engine, world: World) -> dict[str, Any]:
    """The job as it is, for some steps, with nothing of ours between them. Comes first: memory only ever peaks."""
    run = Run(job, world, step["steps"])
    engine.train(job, world, run)
    return run.observations() | {"peak_memory_bytes": _peak_memory_bytes(world)}


def prove(plan: Plan, step: Plan, job: Job, engine: engines.Engine, world: World) -> dict[str, Any]:
    """One training of the proof, observed, with the weights that rank 0 ends with."""
    training = Training(step["name"], step["steps"], step["dtype"], step["replicas"])
    small = proof_job(job, training)
    run = Run(small, world, steps_of(training), observe=True)
    state = engine.train(small, world, run)
    if world.rank == 0:
        _write_state(plan, world, training.name, state)
    return run.observations() | _evaluated(small, state, world)


def train(plan: Plan, step: Plan, job: Job, engine: engines.Engine, world: World) -> dict[str, Any]:
    """The whole job, for the user: progress, a final evaluation, and weights.safetensors from rank 0."""
    steps = job.epochs * inspection.schedule_of(job, 1).steps_per_epoch
    folder = Path(plan["out"])

    def progress(done: int, loss: float) -> None:
        write_json(folder / "progress.json", {"phase": "train", "done": done, "steps": steps, "loss": loss})

    run = Run(job, world, steps, progress=progress if world.rank == 0 else None)
    state = engine.train(job, world, run)
    seen = run.observations()
    if world.rank == 0:
        from safetensors.torch import save_file

        beside = folder / ".weights.safetensors"
        # Cloned, because the format takes no two names for one memory (tied weights).
        save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}, beside)
        os.replace(beside, folder / "weights.safetensors")
    _tell(plan, world, "evaluate")
    return seen | _evaluated(job, state, world) | {"peak_memory_bytes": _peak_memory_bytes(world)}


KINDS: dict[str, Callable[[Plan, Plan, Job, engines.Engine, World], dict[str, Any]]] = {
    "measure": measure,
    "prove": prove,
    "train": train,
}


def play_reference(plan: Plan, world: World) -> dict[str, Any]:
    """The reference's trainings for every layout: as they are, and twice more with rounding shaken."""
    from samestep.engines import reference

    job = build(plan["job"], plan["settings"])
    layouts = {}
    for number, planned in enumerate(plan["layouts"]):
        rounds_to = planned.pop("rounds_to")
        layout = Layout(**planned)
        for dtype in ("float64", "float32"):
            try:
                played = _play(reference, plan, job, layout, rounds_to, dtype, number, world)
                break
            except UserError:
                raise
            except Exception as error:  # a model that float64 does not fit is proven in float32, and says so
                if dtype == "float32":
                    raise
                reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                plan["float64_failed"] = reason
        layouts[str(number)] = played | {"layout": asdict(layout), "dtype": dtype, "rounds_to": rounds_to}
        layouts[str(number)]["float64_failed"] = plan.get("float64_failed") if dtype == "float32" else None
    return {"layouts": layouts}


def _play(
    reference: Any, plan: Plan, job: Job, layout: Layout, rounds_to: str | None, dtype: str, number: int, world: World
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in plan["trainings"]:
        _tell(plan, world, f"reference {name}, {layout.replicas} replicas")
        training = Training(name, plan["steps"], dtype, plan["replicas"])
        small = proof_job(job, training)
        base = reference.play(small, layout, steps_of(training), device=world.device)
        played = [base]
        for seed in (1, 2):
            noise = reference.Noise(getattr(torch, rounds_to or dtype), seed, base["draws"])
            played.append(reference.play(small, layout, steps_of(training), noise=noise, device=world.device))
        for variant, result in enumerate(played):
            key = f"{number}.{name}.{variant}"
            _write_state(plan, world, key, result.pop("state"))
            start, buffers, alone = result.pop("start"), result.pop("buffers"), result.pop("rank0_gradient")
            if variant == 0:
                _write_state(plan, world, f"{key}.start", start)
                _write_state(plan, world, f"{key}.rank0_gradient", alone)
                for replica, of_replica in enumerate(buffers):
                    _write_state(plan, world, f"{key}.buffers{replica}", of_replica)
                result["start_digest"] = digest_state(small.model())
                result["parameters"] = [n for n, _ in small.model().named_parameters(remove_duplicate=False)]
                result["evaluation_length"] = 0 if small.evaluation is None else len(small.evaluation)
                result["length"] = len(small.train)
                result["clip_norm"] = small.clip_norm
            out[f"{name}.{variant}"] = result
    return out


def _evaluated(job: Job, state: dict[str, torch.Tensor], world: World) -> dict[str, Any]:
    if job.evaluation is None:
        return {"evaluation": None}
    evaluation = evaluate(job, plain_model(job, state, world), world)
    return {"evaluation": asdict(evaluation) | {"means": evaluation.means()}}


def _write_state(plan: Plan, world: World, name: str, state: dict[str, torch.Tensor]) -> None:
    arrays = {}
    for key, tensor in state.items():
        tensor = tensor.detach().cpu()
        arrays[key] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    write_arrays(Path(plan["out"]) / f"rank{world.rank}.{name}.npz", arrays)


def _tell(plan: Plan, world: World, phase: str) -> None:
    if world.rank == 0:
        write_json(Path(plan["out"]) / "progress.json", {"phase": phase})


def _peak_memory_bytes(world: World) -> int:
    if world.device != "cpu":
        return torch.cuda.max_memory_allocated(world.device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def rank_main(path: str, do: Callable[[Plan, World], dict[str, Any]]) -> None:
    """The life of one rank. Never returns.

    It ends with os._exit once its record is on the disk and the group is closed: gloo's threads abort about one in
    three healthy processes in the interpreter's own exit.
    """
    die_with_parent()
    plan: Plan = json.loads(Path(path).read_text())
    folder = Path(plan["out"])
    rank = os.environ.get("RANK", "0")
    (folder / f"pid-rank{rank}").write_text(str(os.getpid()))
    if hasattr(signal, "SIGUSR1"):  # whoever waits in vain for this rank can ask where it stands
        stacks = open(folder / f"stack-rank{rank}.txt", "w")  # noqa: SIM115 - open as long as the process lives
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    code = 0
    try:
        world = World.from_env(os.environ)
        record = {"schema": SCHEMA, "rank": world.rank, "world": asdict(world), "threads": torch.get_num_threads()}
        record |= {"started_at": plan["started_at"], "machine": machine(world.device)} | do(plan, world)
        write_json(folder / f"rank{rank}.json", record)
    except BaseException as error:
        code = 2 if isinstance(error, UserError) else 1
        kind = "refused" if isinstance(error, Refused) else "user" if code == 2 else "crash"
        text = str(error).strip()
        message = text if code == 2 else f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
        write_json(
            folder / f"error-rank{rank}.json",
            {"rank": int(rank), "kind": kind, "message": message, "time": time.time()}
            | {"traceback": traceback.format_exc(), "lost_peer": bool(LOST_PEER.search(text))},
        )
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def machine(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    gpu = None if device == "cpu" else torch.cuda.get_device_name(device)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "host": platform.node(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpu": gpu,
    }


def _processor() -> str:
    """The processor's model name where the system tells it, else its architecture."""
    try:
        names = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def _spawned(local_rank: int, size: int, path: str) -> None:
    os.environ |= {
        "RANK": str(local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
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


def inspect_main(path: str) -> None:
    """Answers a query about a job and the engines, in the file that the query names."""
    query: Plan = json.loads(Path(path).read_text())
    answer: dict[str, Any] = {"error": None}
    try:
        devices = inspection.find_devices(query["device"])
        replicas = query["replicas"] or (2 if devices[0] == "cpu" else len(devices))
        answer |= {
            "devices": devices,
            "machine": machine(devices[0]),
            "replicas": replicas,
            "engines": inspection.inspect_engines(devices, replicas),
        }
        if query["job"] is not None:
            answer["job"] = inspection.inspect_job(query["job"], query["settings"], replicas, query["steps"])
    except UserError as error:
        answer["error"] = str(error)
    write_json(Path(query["answer"]), answer)


def main(arguments: list[str]) -> None:
    match arguments:
        case ["--inspect", path]:
            die_with_parent()
            inspect_main(path)
            os._exit(0)  # a thread that the job started must not keep the answer waiting
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
