"""The command `samestep`. One short function a command: each is one call into one room."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from samestep.commands import options
from samestep.commands.exit_codes import told
from samestep.commands.options import pairs
from samestep.errors import UserError, say
from samestep.records.record import finite, write_json

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Write the training job once. Run it on every PyTorch distributed engine, prove that each takes the same "
    "step, and measure which is fastest here.",
)


@app.command()
@told
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
    nnodes: options.Nnodes = None,
    node_rank: options.NodeRank = None,
    master_addr: options.MasterAddr = "",
    port: options.Port = 0,
    hosts: options.Hosts = "",
    interface: options.Interface = "",
    max_restarts: options.MaxRestarts = 0,
    timeout: options.Timeout = 120.0,
) -> int:
    """Prove, then measure: a table and a report with plots. Exit 1 if an engine differs or none is proven."""
    return _study("compare", locals())


@app.command()
@told
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
    nnodes: options.Nnodes = None,
    node_rank: options.NodeRank = None,
    master_addr: options.MasterAddr = "",
    port: options.Port = 0,
    hosts: options.Hosts = "",
    interface: options.Interface = "",
    max_restarts: options.MaxRestarts = 0,
    timeout: options.Timeout = 120.0,
) -> int:
    """The proof alone: is it still the same training? Names the first divergence; exit codes as compare's."""
    return _study("verify", locals())


@app.command()
@told
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
    evaluate_every: options.EvaluateEvery = 1,
    best: options.Best = "",
    patience: options.Patience = None,
) -> int:
    """Train for real: progress, a final evaluation, and weights.safetensors. Inside torchrun, srun, mpirun or
    horovodrun, this command is one of their ranks."""
    if not engine.strip() or "," in engine + launcher or "all" in (engine, launcher):
        raise UserError("run trains on one engine under one launcher; give one name each, as in --engine ddp")
    asked = _asked({**locals(), "engines": engine, "launchers": launcher})
    if to:
        from samestep import engine as engines
        from samestep.launch import submit
        from samestep.launch.submit.kubernetes import manifests

        engines.check(engine)
        elsewhere = {"--out": out, "--launcher": launcher, "--hosts": hosts, "--node-rank": node_rank}
        elsewhere |= {"--master-addr": master_addr, "--port": port, "--dry-run": dry_run, "--json": json_}
        options.refuse(elsewhere, "is decided by the manifests that --to writes; leave it out")
        gpus = 0 if device == "cpu" else nproc or 1
        wishes = options.wishes(init, evaluate_every, best, patience)
        training = submit.Training(job, nnodes or 1, nproc or 1, gpus, engine, set_, set_engine, wishes)
        print(manifests(to, training, image, claim), end="")
        return 0
    from samestep.commands.one_launch import conduct
    from samestep.commands.progress import trained
    from samestep.commands.train import Wishes

    wished = Wishes(init, evaluate_every, best, patience)
    results = conduct("run", asked, lambda found: wished.training(found["job"]["metrics"]))
    return _ended(results, json_, trained)


@app.command()
@told
def evaluate(
    weights: Annotated[Path, typer.Option(help="The weights.safetensors that a run left.")],
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
    """What trained weights come to: each row of the job's evaluation once, the same figures on any number of ranks."""
    from samestep.commands.one_launch import conduct
    from samestep.commands.progress import scored
    from samestep.commands.train import scoring

    given = {**locals(), "engines": "ddp", "launchers": launcher, "set_engine": [], "max_restarts": 0}
    asked = _asked({**given, "dry_run": False})
    results = conduct("evaluate", asked, lambda found: scoring(weights, predictions, found["job"]["evaluation_rows"]))
    return _ended(results, json_, scored)


@app.command()
@told
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
    evaluate_every: options.EvaluateEvery = 1,
    best: options.Best = "",
    patience: options.Patience = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script, and submit nothing.")] = False,
) -> int:
    """Write the batch script of a training, and submit it to Slurm."""
    from samestep import engine as engines
    from samestep.commands import results_folder
    from samestep.commands.train import file_of
    from samestep.launch.submit import Training
    from samestep.launch.submit.slurm import script, submit

    engines.check(engine)
    pairs(set_, "--set"), pairs(set_engine, "--set-engine")
    wishes = options.wishes(init and file_of(init, "--init"), evaluate_every, best, patience)
    training = Training(job, nodes, nproc or gpus_per_node or 2, gpus_per_node, engine, set_, set_engine, wishes)
    results = (out or results_folder.dated(job)).resolve()
    text = script(training, results, time, sbatch)
    if dry_run:
        print(text, end="")
        return 0
    path = results_folder.beside(results, "slurm.sh", text)
    number = submit(path)
    print(f"job {number} is in the queue; its script is {path}, its words are in {results}/slurm-{number}.out")
    return 0


@app.command()
@told
def engines(device: options.Device = "auto", json_: options.Json = False) -> int:
    """What runs here, what is missing, and the line that installs it."""
    from samestep.commands.ask_worker import ask
    from samestep.commands.progress import engine_table

    rows = ask(device=device)["engines"]
    keys = ("name", "available", "reason", "install", "version", "purpose")
    listed = [{key: row[key] for key in keys} for row in rows]
    _print(listed, json_, lambda: engine_table(listed))
    return 0


@app.command()
@told
def eject(
    job: options.Job = "digits",
    engine: options.Engine = "ddp",
    nproc: Annotated[int, typer.Option(help="Ranks in the script's launch line.", min=1)] = 2,
    set_: options.Set = [],  # noqa: B006
    set_engine: options.SetEngine = [],  # noqa: B006
    to: Annotated[
        Path | None, typer.Option(help="File to write; stdout where none is named. Never replaces one.")
    ] = None,
) -> int:
    """Write one stand-alone script of the job on an engine, with no samestep in it."""
    from samestep.commands.ask_worker import script

    if to is not None and to.exists():
        raise UserError(f"{to} exists, and would be replaced; give another name with --to")
    file = to.name if to else "train.py"
    settings = pairs(set_, "--set"), pairs(set_engine, "--set-engine")
    text = script(job, settings[0], engine, settings[1], nproc, file)
    if to is None:
        print(text, end="")
        return 0
    try:
        to.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{to} cannot be written ({error.strerror}); give another name with --to") from None
    say(f"wrote {to}")
    return 0


def _asked(given: Mapping[str, Any]) -> dict[str, Any]:
    """A command's options by the names that rooms know."""
    settings = {
        "settings": pairs(given["set_"], "--set"),
        "engine_settings": pairs(given["set_engine"], "--set-engine"),
    }
    return {**given, **settings, "deadline_s": given["deadline"]}


def _ended(results: Mapping[str, Any] | None, json_: bool, show: Callable[[Mapping[str, Any]], None]) -> int:
    """Shows what a launch came to; None where there is nothing to show. Its exit code."""
    if results is None:
        return 0
    _print(results, json_, lambda: show(results))
    return 130 if results.get("stopped") == "asked" else 0


def _study(command: str, given: Mapping[str, Any]) -> int:
    from samestep.commands import setup
    from samestep.launch import fork_client

    asked = _asked(given)
    setup.refuse_inside(command, os.environ, asked["launchers"])
    servers: tuple[fork_client.Of, ...] = ("ranks", "reference") if command == "verify" else ("reference",)
    with fork_client.started(*servers):
        return _studied(command, asked)


def _studied(command: str, asked: Mapping[str, Any]) -> int:
    from samestep import report
    from samestep.commands import other_machines, setup
    from samestep.commands.compare import conduct
    from samestep.commands.progress import Launches, studied

    study, found = setup.study_of(asked["job"], asked["settings"], asked)
    if not setup.is_first(study.machines):
        count = other_machines.follow(study, setup.shared_folder(asked["out"]))
        say(f"this machine took part in {count} launches; the results are on {study.machines.master}")
        return 0
    folder = setup.folder_of(command, study, found, asked["out"])
    with Launches() as progress, other_machines.ending(study, folder):
        results = conduct(study, found, folder, progress.tell)
    results |= {"command": shlex.join(["samestep", *sys.argv[1:]]), "report": os.path.relpath(folder / "report.html")}
    write_json(folder / "results.json", results)
    (folder / "report.html").write_text(report.html(results), encoding="utf-8")
    _print(results, asked["json_"], lambda: studied(results))
    verdicts = {row["verdict"] for row in results["engines"]}
    # Nothing proven is no success either: a script that asks for one engine must not read 'unavailable' as 'same'.
    return 1 if verdicts & {"differs", "failed"} or not verdicts & {"same", "approximate"} else 0


def _print(value: Any, as_json: bool, show: Callable[[], None]) -> None:
    if as_json:
        print(json.dumps(finite(value), indent=1))
    else:
        show()


def main() -> None:
    app()


if __name__ == "__main__":
    main()
