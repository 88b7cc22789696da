"""The command `samestep`. One short function a command: each is one call into one room."""

from __future__ import annotations

import functools
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec

import typer

from samestep.errors import TrainingFailed, UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Write the training job once. Run it on every PyTorch distributed engine, prove that each takes the same "
    "step, and measure which is fastest here.",
)

P = ParamSpec("P")

JobArgument = Annotated[
    str, typer.Argument(metavar="[JOB]", help="A built-in job (digits), file.py:function or package.module:function.")
]
Engines = Annotated[
    str, typer.Option("--engines", "--engine", help="Engines, separated by commas, or all; all where none is named.")
]
Nproc = Annotated[
    int | None, typer.Option(help="Ranks on this machine (for dataparallel: devices); one for each GPU, or 2 on a CPU.")
]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="A setting of the job; repeatable.")]
SetEngine = Annotated[
    list[str],
    typer.Option("--set-engine", metavar="KEY=VALUE", help="A setting of the engines that have it; or ENGINE.KEY."),
]
Out = Annotated[Path | None, typer.Option(help="Folder for the results; a dated one under runs/ where none is named.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value on stdout, and nothing else there.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, or a list such as cuda:0,cuda:1.")]
Port = Annotated[int, typer.Option(help="The port where the ranks meet; 0: any free one.", min=0, max=65535)]
Launchers = Annotated[
    str,
    typer.Option(
        "--launchers", "--launcher", help="Launchers, separated by commas, or all; the engine's first where none."
    ),
]
Steps = Annotated[int, typer.Option(help="Optimizer steps of each training of the proof.", min=4)]
Deadline = Annotated[
    float | None, typer.Option(help="Seconds after which a launch is ended, each rank's stack in its folder.", min=1)
]


def told(command: Callable[P, int]) -> Callable[P, NoReturn]:
    """Ends a command with its exit code; a user's mistake is one sentence and 2, a 'no' is 1."""

    @functools.wraps(command)
    def ended(*args: P.args, **kwargs: P.kwargs) -> NoReturn:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what we started is ended on the way out
        try:
            code = command(*args, **kwargs)
        except UserError as error:
            _say(f"samestep: {error}")
            code = 2
        except TrainingFailed as error:
            _say(f"samestep: {error}")
            code = 1
        except KeyboardInterrupt:
            _say("samestep: interrupted; everything that was started has ended")
            code = 130
        raise typer.Exit(code)

    return ended


@app.command()
@told
def compare(
    job: JobArgument = "digits",
    engines: Engines = "",
    nproc: Nproc = None,
    set_: Set = [],  # noqa: B006 - typer copies it
    set_engine: SetEngine = [],  # noqa: B006
    out: Out = None,
    launchers: Launchers = "",
    device: Device = "auto",
    rounds: Annotated[int, typer.Option(help="Measured launches of each engine, interleaved.", min=1)] = 5,
    measured_steps: Annotated[int, typer.Option(help="Steps measured in each launch.", min=2)] = 100,
    warmup_steps: Annotated[int, typer.Option(help="Steps run before those, and left out.", min=1)] = 20,
    steps: Steps = 8,
    port: Port = 0,
    deadline: Deadline = None,
    json_: Json = False,
) -> int:
    """Prove, then measure: a table and a report with plots. Exit 1 if an engine differs or none is proven."""
    measured = {"rounds": rounds, "measured_steps": measured_steps, "warmup_steps": warmup_steps}
    asked = {"engines": engines, "launchers": launchers, "device": device, "steps": steps, "port": port}
    asked["engine_settings"] = _settings(set_engine, "--set-engine")
    return _study("compare", job, nproc, set_, out, asked | measured | {"deadline_s": deadline}, json_)


@app.command()
@told
def verify(
    job: JobArgument = "digits",
    engines: Engines = "",
    nproc: Nproc = None,
    set_: Set = [],  # noqa: B006
    set_engine: SetEngine = [],  # noqa: B006
    out: Out = None,
    launchers: Launchers = "",
    device: Device = "auto",
    steps: Steps = 8,
    port: Port = 0,
    deadline: Deadline = None,
    json_: Json = False,
) -> int:
    """The proof alone: is it still the same training? Names the first divergence; exit codes as compare's."""
    asked = {"engines": engines, "launchers": launchers, "device": device, "steps": steps, "port": port}
    asked["engine_settings"] = _settings(set_engine, "--set-engine")
    return _study("verify", job, nproc, set_, out, asked | {"deadline_s": deadline}, json_)


@app.command()
@told
def run(
    job: JobArgument = "digits",
    engine: Annotated[str, typer.Option("--engine", "--engines", help="The engine that trains.")] = "ddp",
    nproc: Nproc = None,
    set_: Set = [],  # noqa: B006
    set_engine: SetEngine = [],  # noqa: B006
    out: Out = None,
    launcher: Annotated[
        str, typer.Option("--launcher", "--launchers", help="How to start it; the engine's first where none is named.")
    ] = "",
    device: Device = "auto",
    port: Port = 0,
    deadline: Deadline = None,
    json_: Json = False,
) -> int:
    """Train for real: progress, a final evaluation, and weights.safetensors."""
    if "," in engine + launcher or "all" in (engine, launcher):
        raise UserError("run trains on one engine under one launcher; give one name each, as in --engine ddp")
    from samestep.show import Training, trained
    from samestep.train import train

    asked = {"engines": engine, "launchers": launcher, "device": device, "port": port, "deadline_s": deadline}
    asked["engine_settings"] = _settings(set_engine, "--set-engine")
    study, found, folder = _begin("run", job, nproc, set_, out, asked)
    with Training(f"{job} on {engine}") as progress:
        results = train(study, found, folder, progress.tell)
    _print(results, json_, lambda: trained(results))
    return 0


@app.command()
@told
def engines(device: Device = "auto", json_: Json = False) -> int:
    """What runs here, what is missing, and the line that installs it."""
    from samestep.inquiry import ask
    from samestep.show import engine_table

    rows = ask(device=device)["engines"]
    keys = ("name", "available", "reason", "install", "version", "purpose")
    listed = [{key: row[key] for key in keys} for row in rows]
    _print(listed, json_, lambda: engine_table(listed))
    return 0


@app.command()
@told
def eject(
    job: JobArgument = "digits",
    engine: Annotated[
        str, typer.Option("--engine", "--engines", help="The engine whose loop the script holds.")
    ] = "ddp",
    nproc: Annotated[int, typer.Option(help="Ranks in the script's launch line.", min=1)] = 2,
    set_: Set = [],  # noqa: B006
    set_engine: SetEngine = [],  # noqa: B006
    to: Annotated[
        Path | None, typer.Option(help="File to write; stdout where none is named. Never replaces one.")
    ] = None,
) -> int:
    """Write one stand-alone script of the job on an engine, with no samestep in it."""
    from samestep.inquiry import script

    if to is not None and to.exists():
        raise UserError(f"{to} exists, and would be replaced; give another name with --to")
    file = to.name if to else "train.py"
    settings = _settings(set_, "--set"), _settings(set_engine, "--set-engine")
    text = script(job, settings[0], engine, settings[1], nproc, file)
    if to is None:
        print(text, end="")
        return 0
    try:
        to.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{to} cannot be written ({error.strerror}); give another name with --to") from None
    _say(f"samestep: wrote {to}")
    return 0


def _study(
    command: str, job: str, nproc: int | None, set_: list[str], out: Path | None, asked: Mapping[str, Any], json_: bool
) -> int:
    from samestep import report
    from samestep.compare import conduct
    from samestep.record import write_json
    from samestep.show import Launches, studied

    study, found, folder = _begin(command, job, nproc, set_, out, asked)
    with Launches() as progress:
        results = conduct(study, found, folder, progress.tell)
    results |= {"command": shlex.join(["samestep", *sys.argv[1:]]), "report": os.path.relpath(folder / "report.html")}
    write_json(folder / "results.json", results)
    (folder / "report.html").write_text(report.html(results), encoding="utf-8")
    _print(results, json_, lambda: studied(results))
    verdicts = {row["verdict"] for row in results["engines"]}
    # Nothing proven is no success either: a script that asks for one engine must not read 'unavailable' as 'same'.
    return 1 if verdicts & {"differs", "failed"} or not verdicts & {"same", "approximate"} else 0


def _begin(
    command: str, job: str, nproc: int | None, set_: list[str], out: Path | None, asked: Mapping[str, Any]
) -> tuple[Any, dict[str, Any], Path]:
    """Checks what the user gave, as far as it can be without starting a training."""
    from samestep import __version__, engine, folder, launch
    from samestep.inquiry import ask
    from samestep.study import Study

    if nproc is not None and nproc < 1:
        raise UserError(f"--nproc {nproc}: at least one rank must train; give --nproc 1 or more")
    if nproc is not None and nproc > 64 * (os.cpu_count() or 1):
        raise UserError(f"--nproc {nproc}: this machine has {os.cpu_count()} cores; give at most 64 ranks for each")
    names = {key: _list(asked[key]) for key in ("engines", "launchers")}
    if "all" in names["engines"]:
        names["engines"] = ()
    for name in names["engines"]:
        engine.check(name)
    for name in names["launchers"]:
        if name != "all":
            launch.load(name)
    settings = _settings(set_, "--set")
    found = ask(
        job,
        settings,
        device=asked["device"],
        replicas=nproc,
        steps=asked.get("steps", 8),
        deadline_s=asked["deadline_s"],
        engines=names["engines"],
        engine_settings=asked["engine_settings"],
    )
    study = Study(job=job, settings=settings, nproc=found["replicas"], **{**asked, **names})
    versions = {"samestep": __version__, "torch": found["machine"]["torch"]}
    identity = {"command": command, "file": found["job"]["source"], "package": folder.package_digest()} | versions
    identity |= {key: value for key, value in vars(study).items() if key not in ("deadline_s", "port")}
    cores = os.cpu_count() or 1
    if found["devices"][0] == "cpu" and study.nproc > cores:
        _say(f"samestep: {study.nproc} ranks share {cores} cores: the proof holds, the speed says little")
    return study, found, folder.prepare(out, job, identity)


def _list(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())


def _settings(pairs: list[str], flag: str) -> dict[str, str]:
    wrong = [pair for pair in pairs if "=" not in pair]
    if wrong:
        raise UserError(f"{flag} {wrong[0]}: write it as key=value")
    return dict(pair.split("=", 1) for pair in pairs)


def _print(value: Any, as_json: bool, show: Callable[[], None]) -> None:
    if as_json:
        print(json.dumps(value, indent=1))
    else:
        show()


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
