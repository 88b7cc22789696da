"""The command line `samestep`: one short function per command, which turns its options into a Setup."""

from __future__ import annotations

import errno
import json
import os
import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from samestep.commands.command_options import (
    CheckOptions,
    CollectivesOptions,
    CompareOptions,
    Device,
    DoctorOptions,
    EjectOptions,
    EvaluateOptions,
    MonitorOptions,
    ProofOptions,
    RunOptions,
    SlurmOptions,
    VerifyOptions,
    texts,
)
from samestep.commands.exit_codes import (
    exit_code,
    exit_code_of_check,
    exit_code_of_run,
    survive_lost_output,
    with_exit_code,
)
from samestep.commands.grouped_help import GroupedHelp
from samestep.commands.options import LARGEST, from_command_line, path, refuse
from samestep.errors import UserError, say
from samestep.records.redaction import typed_command

app = typer.Typer(
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Write the training job once. Run it on every PyTorch distributed engine, prove that each takes the same "
    "step, and measure which is fastest here.",
)


@app.callback()
def version(
    show: Annotated[
        bool, typer.Option("--version", help="Print the versions of samestep and torch, and exit.")
    ] = False,
) -> None:
    if not show:
        return
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    from samestep.version import __version__

    try:
        torch = f" (torch {installed('torch')})"
    except PackageNotFoundError:
        torch = " (without torch)"
    print(f"samestep {__version__}{torch}")
    raise typer.Exit(0)


USAGE_ERROR: Any = typer.BadParameter.__base__  # click's, or that of the typer that has a click of its own
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value on stdout, and nothing else there.")]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Exit 1 also where N ranks differ from one process as expected: dropout, BatchNorm."),
]


@app.command(cls=GroupedHelp)
@with_exit_code
@from_command_line
def compare(options: CompareOptions, json_: Json = False, strict: Strict = False) -> int:
    """Prove each engine, then measure it: a table and a report with plots. Exit 1 if one differs or none is proven."""
    return _verify_or_compare("compare", options, json_, strict)


@app.command(cls=GroupedHelp)
@with_exit_code
@from_command_line
def verify(
    options: VerifyOptions,
    json_: Json = False,
    strict: Strict = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print each fault that was tried for a difference, and what it leaves.")
    ] = False,
) -> int:
    """Prove each engine without measuring it. Names the first divergence; exit codes as for compare."""
    return _verify_or_compare("verify", options, json_, strict, explain=explain)


@app.command(cls=GroupedHelp)
@with_exit_code
@from_command_line
def run(
    options: RunOptions,
    json_: Json = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the shell line that would start it.")] = False,
    to: Annotated[
        str, typer.Option(help="Print manifests instead of training: k8s (Indexed Job) or kubeflow (PyTorchJob).")
    ] = "",
    image: Annotated[str, typer.Option(help="The container image that holds samestep and the job.")] = "",
    claim: Annotated[str, typer.Option(help="The PersistentVolumeClaim for the results.")] = "",
) -> int:
    """Train the whole job: progress, evaluations, and weights.safetensors. Under torchrun, srun, mpirun or horovodrun,
    this command is one of their ranks."""
    from samestep.commands import api
    from samestep.commands.progress import show_training

    if to:
        from samestep.commands.submit import kubernetes

        unused = {"--dry-run": dry_run, "--json": json_}
        refuse(unused, "is decided by the manifests that --to writes; leave it out")
        print(kubernetes(options.setup(str(options.job)), options, to, image, claim), end="")
        return 0
    results = api.train_job(options, dry_run=dry_run)
    if results is None:
        return 0
    _print(results, json_, show_training)
    return exit_code_of_run(results)


@app.command(cls=GroupedHelp)
@with_exit_code
@from_command_line
def evaluate(options: EvaluateOptions, json_: Json = False) -> int:
    """Evaluate trained weights: each row of the job's evaluation once, the same figures on any number of ranks."""
    from samestep.commands import api
    from samestep.commands.progress import show_evaluation

    results = api.evaluate_weights(options)
    if results is not None:
        _print(results, json_, show_evaluation)
    return 0


@app.command(cls=GroupedHelp)
@with_exit_code
@from_command_line
def slurm(
    options: SlurmOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script, and submit nothing.")] = False,
) -> int:
    """Write the batch script of a training, and submit it to Slurm."""
    from samestep.commands.submit import slurm_script, submit_to_slurm

    results, text = slurm_script(options)
    print(text if dry_run else submit_to_slurm(results, text), end="")
    return 0


@app.command(cls=GroupedHelp)
@with_exit_code
@from_command_line
def collectives(options: CollectivesOptions, json_: Json = False) -> int:
    """Check the values of torch.distributed's collectives, then measure them over message sizes. Exit 1 if one is
    wrong, or cannot be measured."""
    from samestep.commands import collectives as command
    from samestep.commands.progress import show_collectives
    from samestep.report import collective_text

    if options.show:
        ranks = command.shown(options)
        if ranks:
            print(collective_text.show(ranks, options.show))
        return 0
    results = command.collectives(options)
    if results is None:
        return 0
    _print(results, json_, show_collectives)
    return int(bool(results.wrong or results.failed or not results.checked))


@app.command(cls=GroupedHelp)
@with_exit_code
def engines(device: Device = "auto", json_: Json = False) -> int:
    """List the engines: which run on this machine, what is missing, and the command that installs it."""
    from samestep.commands.ask_worker import ask
    from samestep.commands.progress import show_engines
    from samestep.records.inspection import Question

    listed = ask(Question(device=device)).engines
    if not json_:
        show_engines(listed)
        return 0
    from samestep.records.files import as_json, list_with_schema
    from samestep.report.language import with_english

    keys = ("name", "available", "reason", "install", "version", "purpose")
    rows = ({key: value for key, value in as_json(with_english(facts)).items() if key in keys} for facts in listed)
    print(json.dumps(list_with_schema("engines", rows), indent=1))
    return 0


@app.command(cls=GroupedHelp)
@with_exit_code
@from_command_line
def doctor(
    options: DoctorOptions,
    json_: Json = False,
    all_: Annotated[bool, typer.Option("--all", help="Also list the probes that passed.")] = False,
) -> int:
    """Diagnose this machine or cluster, and print the commands that fix it."""
    from samestep.commands import doctor as command

    report = command.doctor(options, ["--json"] * json_ + ["--all"] * all_)
    if report is None or isinstance(report, int):
        return report or 0
    if json_:
        from samestep.records.files import finite, with_schema
        from samestep.report.language import with_english

        print(json.dumps(finite(with_schema(with_english(report))), indent=1))
    else:
        command.show_report(report, complete=all_)
    return int(report.failed)


@app.command(cls=GroupedHelp)
@with_exit_code
def runs(
    folder: Annotated[
        str, typer.Argument(help="The folder that holds the folders of results, or one of these.")
    ] = "runs",
    json_: Json = False,
) -> int:
    """List past runs: how each ended, its steps and latest evaluation, and the line that continues or repeats it."""
    from samestep.commands.progress import show_runs
    from samestep.commands.runs import runs as listed
    from samestep.records.files import as_json, finite, list_with_schema
    from samestep.report.language import with_english

    past = listed(path(folder, "FOLDER"))
    if json_:
        past = with_english(past)
        print(json.dumps(list_with_schema("runs", (finite(as_json(run)) for run in past)), indent=1))
    else:
        show_runs(past)
    return 0


@app.command(cls=GroupedHelp, context_settings={"allow_interspersed_args": False})
@with_exit_code
@from_command_line
def check(
    options: CheckOptions,
    script: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGUMENTS]...", help="A script as torchrun runs it.")],
    json_: Json = False,
) -> int:
    """Run a script of your own, unedited, with a recorder on each rank; judge its steps and name the first divergence;
    or compare them with a git revision's. Exit 1 if something is wrong, 3 if nothing is but a proof needs more."""
    from samestep.report.check import show_check, show_diff

    if options.compares:
        from samestep.commands.against import check_against

        compared = check_against(options, script)
        _print(compared, json_, show_diff)
        return exit_code_of_check(compared, allow_unknown=options.allow_unknown)
    from samestep.commands.check import check as checked

    results = checked(options, script)
    _print(results, json_, show_check)
    return exit_code_of_check(results, allow_unknown=options.allow_unknown)


@app.command(cls=GroupedHelp, context_settings={"allow_interspersed_args": False})
@with_exit_code
@from_command_line
def monitor(
    options: MonitorOptions,
    words: Annotated[list[str], typer.Argument(metavar="COMMAND [ARGUMENTS]...", help="Any command.")],
) -> int:
    """Run any command, and sample what its processes and the machine use: CPU, memory, disk, network, GPUs. Exits with
    the command's exit code."""
    from samestep.commands.monitor import monitor as monitored

    return monitored(options, words)


@app.command(cls=GroupedHelp)
@with_exit_code
def diff(
    first: Annotated[str, typer.Argument(metavar="RECORD", help="A folder that samestep check has written.")],
    second: Annotated[str, typer.Argument(metavar="RECORD", help="Another one.")],
    resumed_at: Annotated[
        int,
        typer.Option(help="The second was resumed from a checkpoint of the first, of this step.", min=0, max=LARGEST),
    ] = 0,
    json_: Json = False,
) -> int:
    """Compare two records of `samestep check`, as before and after a change, or of a run and of its continuation from a
    checkpoint; name the first divergence. Exit codes as for check."""
    from samestep.commands.judge_records import diff as compared
    from samestep.report.check import show_diff

    results = compared(path(first, "RECORD"), path(second, "RECORD"), resumed_at)
    _print(results, json_, show_diff)
    return exit_code_of_check(results)


@app.command(cls=GroupedHelp)
@with_exit_code
def explain(
    identity: Annotated[str, typer.Argument(metavar="[ID]", help="As `samestep check --json` names it.")] = "",
) -> int:
    """Explain a mistake that samestep check names: its sentence, lines that have it, and the right ones. Without an ID,
    list all."""
    from samestep.commands.explain import explained, mistakes

    print("\n\n".join(explained(identity)) if identity else "\n".join(mistakes()))
    return 0


@app.command(cls=GroupedHelp)
@with_exit_code
@from_command_line
def eject(options: EjectOptions) -> int:
    """Write a script of the job on an engine, and beside it what it needs: it runs where there is no samestep."""
    from samestep.commands.ask_worker import ask_script
    from samestep.commands.script_files import write_script
    from samestep.message import message
    from samestep.records.inspection import EjectQuestion
    from samestep.report import language as language  # the sentences of what is said
    from samestep.world.mesh import parse_mesh

    script_path = Path(options.to) if options.to else None
    if script_path is not None and os.path.lexists(script_path):
        raise UserError(f"{script_path} exists, and would be replaced; give another name with --to")
    settings = texts(options.settings), texts(options.engine_settings)
    file = script_path.name if script_path else "train.py"
    mesh = parse_mesh(options.mesh)
    size = options.nproc or (mesh.size if mesh else 2)
    if mesh:
        mesh.check_ranks(size)
    script = ask_script(
        EjectQuestion(
            job=str(options.job),
            settings=settings[0],
            engine=options.engine,
            engine_settings=settings[1],
            size=size,
            file=file,
            mesh=str(mesh or ""),
        )
    )
    if script_path is None:
        print(script.made[file], end="")
        say(message("script_needs_files", files=[*[*script.made][1:], *script.copied]))
        return 0
    write_script(script, script_path)
    return 0


def _verify_or_compare(command: str, options: ProofOptions, json_: bool, strict: bool, *, explain: bool = False) -> int:
    from samestep.commands import api
    from samestep.commands.progress import show_comparison

    results = api.verify_or_compare(command, options, typed=typed_command())
    if results is None:
        return 0
    _print(results, json_, partial(show_comparison, explain=explain))
    return exit_code(results, strict=strict)


def _print(results: Any, as_json: bool, show: Callable[[Any], None]) -> None:
    if as_json:
        from samestep.records.results import results_json

        print(json.dumps(results_json(results), indent=1))
    else:
        show(results)


def main() -> None:
    """Runs the command. What typer says of a wrong line in three lines is one sentence here."""
    survive_lost_output()
    # torchrun and accelerate of this Python, where its environment is not activated; the user's own come first.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])
    try:
        sys.exit(app(standalone_mode=False))
    except USAGE_ERROR as error:
        if not sys.argv[1:]:
            error.show()  # the help
        else:
            line, message = error.ctx.command_path if error.ctx else "samestep", error.format_message().rstrip(".")
            say(f"{message[:1].lower()}{message[1:]}; see `{line} --help`")
        sys.exit(error.exit_code)
    except OSError as error:  # of a help's text; what commands raise, they name themselves
        if error.errno != errno.ENOSPC:
            raise
        say(f"the output cannot be written ({error.strerror}); free some disk space")
        sys.exit(2)


if __name__ == "__main__":
    main()
