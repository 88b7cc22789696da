"""The command line `samestep`: one short function per command, which turns the options into a Setup."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from samestep.commands import options
from samestep.commands.exit_codes import exit_code, with_exit_code
from samestep.commands.options import engine_names, names, pairs
from samestep.commands.setup import MachineOptions, Setup
from samestep.errors import UserError, say

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Write the training job once. Run it on every PyTorch distributed engine, prove that each takes the same "
    "step, and measure which is fastest here.",
)


@app.command()
@with_exit_code
def compare(
    job: options.Job = "digits",
    engines: options.Engines = "",
    nproc: options.Nproc = None,
    set_: options.Set = [],  # noqa: B006 - typer copies it
    set_engine: options.SetEngine = [],  # noqa: B006
    out: options.Out = None,
    launchers: options.Launchers = "",
    device: options.Device = "auto",
    rounds: Annotated[int, typer.Option(help="Measured launches of each engine, interleaved.", min=1)] = 5,
    measured_steps: Annotated[int, typer.Option(help="Steps measured in each launch.", min=2)] = 100,
    warmup_steps: Annotated[int, typer.Option(help="Steps run before those, and left out.", min=1)] = 20,
    steps: options.Steps = 8,
    deadline: options.Deadline = None,
    json_: options.Json = False,
    strict: options.Strict = False,
    nnodes: options.Nnodes = None,
    node_rank: options.NodeRank = None,
    master_addr: options.MasterAddr = "",
    port: options.Port = 0,
    hosts: options.Hosts = "",
    interface: options.Interface = "",
    max_restarts: options.MaxRestarts = 0,
    timeout: options.Timeout = 120.0,
) -> int:
    """Prove each engine, then measure it: a table and a report with plots. Exit 1 if one differs or none is proven."""
    selection = (
        job,
        pairs(set_, "--set"),
        engine_names(engines),
        pairs(set_engine, "--set-engine"),
        names(launchers, "--launchers"),
    )
    machines = MachineOptions(
        nnodes, node_rank, master_addr, port, names(hosts, "--hosts"), interface, max_restarts, timeout
    )
    setup = Setup(
        *selection,
        nproc,
        device,
        out,
        rounds=rounds,
        measured_steps=measured_steps,
        warmup_steps=warmup_steps,
        steps=steps,
        deadline_s=deadline,
        machines=machines,
    )
    return _study("compare", setup, json_, strict)


@app.command()
@with_exit_code
def verify(
    job: options.Job = "digits",
    engines: options.Engines = "",
    nproc: options.Nproc = None,
    set_: options.Set = [],  # noqa: B006 - typer copies it
    set_engine: options.SetEngine = [],  # noqa: B006
    out: options.Out = None,
    launchers: options.Launchers = "",
    device: options.Device = "auto",
    steps: options.Steps = 8,
    deadline: options.Deadline = None,
    json_: options.Json = False,
    strict: options.Strict = False,
    nnodes: options.Nnodes = None,
    node_rank: options.NodeRank = None,
    master_addr: options.MasterAddr = "",
    port: options.Port = 0,
    hosts: options.Hosts = "",
    interface: options.Interface = "",
    max_restarts: options.MaxRestarts = 0,
    timeout: options.Timeout = 120.0,
) -> int:
    """Prove only that each engine trains the same. Names the first divergence; exit codes as for compare."""
    selection = (
        job,
        pairs(set_, "--set"),
        engine_names(engines),
        pairs(set_engine, "--set-engine"),
        names(launchers, "--launchers"),
    )
    machines = MachineOptions(
        nnodes, node_rank, master_addr, port, names(hosts, "--hosts"), interface, max_restarts, timeout
    )
    setup = Setup(*selection, nproc, device, out, steps=steps, deadline_s=deadline, machines=machines)
    return _study("verify", setup, json_, strict)


@app.command()
@with_exit_code
def run(
    job: options.Job = "digits",
    engine: options.Engine = "ddp",
    nproc: options.Nproc = None,
    set_: options.Set = [],  # noqa: B006
    set_engine: options.SetEngine = [],  # noqa: B006
    out: options.Out = None,
    launcher: options.Launcher = "",
    device: options.Device = "auto",
    deadline: options.Deadline = None,
    json_: options.Json = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the shell line that would start it.")] = False,
    to: options.To = "",
    image: options.Image = "",
    claim: options.Claim = "",
    nnodes: options.Nnodes = None,
    node_rank: options.NodeRank = None,
    master_addr: options.MasterAddr = "",
    port: options.Port = 0,
    hosts: options.Hosts = "",
    interface: options.Interface = "",
    max_restarts: options.MaxRestarts = 0,
    timeout: options.Timeout = 120.0,
    init: options.Init = None,
    evaluate_every: options.EvaluateEvery = None,
    evaluate_steps: options.EvaluateSteps = None,
    best: options.Best = "",
    patience: options.Patience = None,
    log: options.Log = "",
) -> int:
    """Train the whole job. Under torchrun, srun, mpirun or horovodrun, this command is one of their ranks."""
    from samestep.commands import train
    from samestep.commands.progress import show_training

    if not engine.strip() or "," in engine + launcher or "all" in (engine, launcher):
        raise UserError("run trains on one engine under one launcher; give one name each, as in --engine ddp")
    selection = (
        job,
        pairs(set_, "--set"),
        engine_names(engine),
        pairs(set_engine, "--set-engine"),
        names(launcher, "--launcher"),
    )
    machines = MachineOptions(
        nnodes, node_rank, master_addr, port, names(hosts, "--hosts"), interface, max_restarts, timeout
    )
    setup = Setup(*selection, nproc, device, out, deadline_s=deadline, machines=machines)
    training = train.TrainOptions(init, evaluate_every, best, patience, evaluate_steps, names(log, "--log"))
    if to:
        from samestep.commands.submit import kubernetes

        unused = {"--dry-run": dry_run, "--json": json_}
        options.refuse(unused, "is decided by the manifests that --to writes; leave it out")
        print(kubernetes(setup, training, to, image, claim), end="")
        return 0
    results = train.run(setup, training, dry_run=dry_run)
    if results is None:
        return 0
    _print(results, json_, show_training)
    return 130 if results.stopped == "asked" else 0


@app.command()
@with_exit_code
def evaluate(
    weights: Annotated[Path, typer.Option(help="The weights.safetensors of a run.")],
    job: options.Job = "digits",
    nproc: options.Nproc = None,
    set_: options.Set = [],  # noqa: B006
    predictions: Annotated[
        Path | None, typer.Option(help="Keep the model's output for each row, in the dataset's order, as a .npy file.")
    ] = None,
    out: options.Out = None,
    launcher: options.Launcher = "",
    device: options.Device = "auto",
    deadline: options.Deadline = None,
    json_: options.Json = False,
    nnodes: options.Nnodes = None,
    node_rank: options.NodeRank = None,
    master_addr: options.MasterAddr = "",
    port: options.Port = 0,
    hosts: options.Hosts = "",
    interface: options.Interface = "",
    timeout: options.Timeout = 120.0,
) -> int:
    """Evaluate trained weights: each row of the job's evaluation once, the same figures on any number of ranks."""
    from samestep.commands import train
    from samestep.commands.progress import show_scores

    no_engine_settings: dict[str, str] = {}
    selection = (job, pairs(set_, "--set"), ("ddp",), no_engine_settings, names(launcher, "--launcher"))
    machines = MachineOptions(
        nnodes, node_rank, master_addr, port, names(hosts, "--hosts"), interface, timeout_s=timeout
    )
    setup = Setup(*selection, nproc, device, out, deadline_s=deadline, machines=machines)
    results = train.evaluate(setup, train.ScoreOptions(weights, predictions))
    if results is not None:
        _print(results, json_, show_scores)
    return 0


@app.command()
@with_exit_code
def slurm(
    job: options.Job = "digits",
    engine: options.Engine = "ddp",
    set_: options.Set = [],  # noqa: B006
    set_engine: options.SetEngine = [],  # noqa: B006
    out: options.Out = None,
    nodes: Annotated[int, typer.Option(help="Machines.", min=1)] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of each, one for each rank; 0: CPUs.", min=0)] = 0,
    nproc: Annotated[int | None, typer.Option(help="Ranks on each; one for each GPU, or 2 on CPUs.", min=1)] = None,
    time: Annotated[str, typer.Option(help="The job's time limit, as Slurm writes it.")] = "1:00:00",
    sbatch: Annotated[
        list[str], typer.Option(metavar="OPTION", help="More for sbatch, as in --sbatch=--partition=gpu; repeatable.")
    ] = [],  # noqa: B006
    init: options.Init = None,
    evaluate_every: options.EvaluateEvery = None,
    evaluate_steps: options.EvaluateSteps = None,
    best: options.Best = "",
    patience: options.Patience = None,
    log: options.Log = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script, and submit nothing.")] = False,
) -> int:
    """Write the batch script of a training, and submit it to Slurm."""
    from samestep.commands.submit import slurm_script, submit_to_slurm
    from samestep.commands.train import TrainOptions

    selection = (job, pairs(set_, "--set"), engine_names(engine), pairs(set_engine, "--set-engine"), ())
    setup = Setup(*selection, nproc or gpus_per_node or 2, out=out, machines=MachineOptions(nnodes=nodes))
    training = TrainOptions(init, evaluate_every, best, patience, evaluate_steps, names(log, "--log"))
    results, text = slurm_script(setup, training, gpus_per_node, time, sbatch)
    print(text if dry_run else submit_to_slurm(results, text), end="")
    return 0


@app.command()
@with_exit_code
def engines(device: options.Device = "auto", json_: options.Json = False) -> int:
    """List the engines: which run on this machine, what is missing, and the command that installs it."""
    from samestep.commands.ask_worker import ask
    from samestep.commands.progress import show_engines
    from samestep.records.inspection import Question

    listed = ask(Question(device=device)).engines
    if not json_:
        show_engines(listed)
        return 0
    keys = ("name", "available", "reason", "install", "version", "purpose")
    print(json.dumps([{key: getattr(facts, key) for key in keys} for facts in listed], indent=1))
    return 0


@app.command()
@with_exit_code
def eject(
    job: options.Job = "digits",
    engine: options.Engine = "ddp",
    nproc: Annotated[int, typer.Option(help="Ranks in the script's launch line.", min=1)] = 2,
    set_: options.Set = [],  # noqa: B006
    set_engine: options.SetEngine = [],  # noqa: B006
    to: Annotated[
        Path | None, typer.Option(help="File to write; stdout by default. An existing file is never replaced.")
    ] = None,
) -> int:
    """Write one stand-alone script of the job on an engine, with no samestep in it."""
    from samestep.commands.ask_worker import ask_script
    from samestep.records.inspection import EjectQuestion

    if to is not None and to.exists():
        raise UserError(f"{to} exists, and would be replaced; give another name with --to")
    file = to.name if to else "train.py"
    settings = pairs(set_, "--set"), pairs(set_engine, "--set-engine")
    text = ask_script(EjectQuestion(job, settings[0], engine, settings[1], nproc, file))
    if to is None:
        print(text, end="")
        return 0
    try:
        to.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{to} cannot be written ({error.strerror}); give another name with --to") from None
    say(f"wrote {to}")
    return 0


def _study(command: str, setup: Setup, json_: bool, strict: bool) -> int:
    from samestep.commands.compare import run_study, save
    from samestep.commands.progress import Launches, show_study

    with Launches() as progress:
        outcome = run_study(command, setup, progress.show)
    if outcome is None:
        return 0
    results, folder = outcome
    results = replace(results, command=shlex.join(["samestep", *sys.argv[1:]]))
    save(results, folder)
    _print(results, json_, show_study)
    return exit_code(results, strict=strict)


def _print(results: Any, as_json: bool, show: Callable[[Any], None]) -> None:
    if as_json:
        from samestep.records.results import results_json

        print(json.dumps(results_json(results), indent=1))
    else:
        show(results)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
