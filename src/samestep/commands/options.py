"""The options that several commands share: their names, types and help."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from samestep.errors import UserError

Job = Annotated[
    str, typer.Argument(metavar="[JOB]", help="A built-in job (digits), file.py:function or package.module:function.")
]
Engines = Annotated[
    str, typer.Option("--engines", "--engine", help="Engines, separated by commas; all of them by default.")
]
Engine = Annotated[str, typer.Option("--engine", "--engines", help="The engine that trains.")]
Nproc = Annotated[
    int | None,
    typer.Option(help="Ranks on each machine (for dataparallel: devices); one for each GPU, or 2 on a CPU."),
]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="A setting of the job; repeatable.")]
SetEngine = Annotated[
    list[str],
    typer.Option(
        "--set-engine", metavar="KEY=VALUE", help="A setting of the engines that have it, or of one: ENGINE.KEY."
    ),
]
Out = Annotated[Path | None, typer.Option(help="Folder for the results; by default a dated one under runs/.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value on stdout, and nothing else there.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="Exit 1, too, where the job by nature trains otherwise than in one process.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, or a list such as cuda:0,cuda:1.")]
Launchers = Annotated[
    str,
    typer.Option(
        "--launchers", "--launcher", help="Launchers, separated by commas, or all; by default each engine's first."
    ),
]
Launcher = Annotated[
    str,
    typer.Option(
        "--launcher", "--launchers", help="The launcher that starts the ranks; by default the engine's first."
    ),
]
Steps = Annotated[int, typer.Option(help="Optimizer steps of each training of the proof.", min=4)]
Deadline = Annotated[
    float | None,
    typer.Option(help="Seconds after which a launch is ended; each rank's stack is written to its folder.", min=1),
]

MACHINES = "Machines"
Nnodes = Annotated[
    int | None,
    typer.Option(help="Machines: 1, or the Slurm job's. Type the same line on each.", min=1, rich_help_panel=MACHINES),
]
NodeRank = Annotated[
    int | None,
    typer.Option(
        help="This machine's number; by default the rendezvous numbers the machines.",
        min=0,
        rich_help_panel=MACHINES,
    ),
]
MasterAddr = Annotated[
    str, typer.Option(help="The machine of the rendezvous, by name or address.", rich_help_panel=MACHINES)
]
Port = Annotated[
    int,
    typer.Option(
        "--port",
        "--master-port",
        help="The port of the rendezvous; 0: any free one.",
        min=0,
        max=65535,
        rich_help_panel=MACHINES,
    ),
]
Hosts = Annotated[
    str, typer.Option(help="Machines that mpirun starts on, separated by commas.", rich_help_panel=MACHINES)
]
Interface = Annotated[
    str,
    typer.Option(
        help="The network interface for gloo and NCCL; by default the one that leads to the master.",
        rich_help_panel=MACHINES,
    ),
]
MaxRestarts = Annotated[
    int,
    typer.Option(help="How often torchrun restarts all ranks after one has died.", min=0, rich_help_panel=MACHINES),
]
Timeout = Annotated[
    float, typer.Option(help="Seconds that a rank waits for the others.", min=1, rich_help_panel=MACHINES)
]

Init = Annotated[Path | None, typer.Option(help="Weights to start from: a safetensors file of the same model.")]
Best = Annotated[str, typer.Option(help="Keep the best weights by a metric, as in accuracy, loss or error:min.")]
Patience = Annotated[
    int | None, typer.Option(help="Stop after so many evaluations without a better --best metric.", min=1)
]
Log = Annotated[
    str,
    typer.Option(help="Write losses, rates, speed and evaluations: csv, tensorboard, wandb (offline), or several."),
]
EvaluateEvery = Annotated[
    int | None,
    typer.Option(help="Epochs from one evaluation to the next (by default 1); 0: only the last.", min=0),
]
EvaluateSteps = Annotated[
    int | None,
    typer.Option(help="Optimizer steps from one evaluation to the next, instead of epochs, or besides.", min=1),
]

KUBERNETES = "Kubernetes"
To = Annotated[
    str,
    typer.Option(
        help="Print manifests instead of training: k8s (Indexed Job) or kubeflow (PyTorchJob).",
        rich_help_panel=KUBERNETES,
    ),
]
Image = Annotated[
    str, typer.Option(help="The container image that holds samestep and the job.", rich_help_panel=KUBERNETES)
]
Claim = Annotated[str, typer.Option(help="The PersistentVolumeClaim for the results.", rich_help_panel=KUBERNETES)]


def names(given: str, flag: str) -> tuple[str, ...]:
    """Parses 'a, b' into ('a', 'b'). Raises UserError for a text without a name."""
    parsed = tuple(name.strip() for name in given.split(",") if name.strip())
    if given and not parsed:
        raise UserError(f"{flag} {given!r} names none; leave it out for all of them")
    return parsed


def engine_names(given: str) -> tuple[str, ...]:
    """Parses --engines. Returns an empty tuple for all engines."""
    parsed = names(given, "--engines")
    return () if "all" in parsed else parsed


def pairs(given: list[str], flag: str) -> dict[str, str]:
    """Parses ['a=1'] into {'a': '1'}. Raises UserError for a pair without '='."""
    wrong = [pair for pair in given if "=" not in pair]
    if wrong:
        raise UserError(f"{flag} {wrong[0]}: write it as key=value")
    return dict(pair.split("=", 1) for pair in given)


def refuse(given: Mapping[str, object], why: str) -> None:
    """Raises UserError for the first of the options that is set."""
    for option, value in given.items():
        if value:
            raise UserError(f"{option} {why}")
