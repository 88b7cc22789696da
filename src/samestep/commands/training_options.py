"""The options of a training, and of an evaluation of weights: one field each, for the command line and for Python."""

from __future__ import annotations

import hashlib
import re
import tempfile
from dataclasses import KW_ONLY, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from samestep.commands.machine_options import MeshOption
from samestep.commands.options import Names, Options, Typed, names
from samestep.errors import UserError, first_few, nearest, nearest_name
from samestep.message import message
from samestep.records.checkpoint import other_file
from samestep.world.regular_files import open_regular

if TYPE_CHECKING:
    from samestep.records.checkpoint import Interval
    from samestep.records.inspection import JobFacts
    from samestep.records.plan import EvaluateTask, RunTask

LOGS = {"csv": "", "tensorboard": "tensorboard", "wandb": "wandb"}  # --log -> the package that it needs


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Options):
    """The options of a training.

    init: weights to start from. evaluate_every: epochs from one evaluation to the next; 0: only the last; None: 1, or 0
    where evaluate_steps is given. evaluate_steps: optimizer steps from one evaluation to the next.
    log: of LOGS. export: the folder that from_pretrained is to load. on_nan: 'stop' or 'skip', what to do at a loss or
    gradient that is not finite. check_replicas: steps between two comparisons of the ranks' weights; 0: none.
    spot_check: 'every=1000' or 'every=1000,stop': steps from one that is replayed to the next; '': none are.

    checkpoint_every: '500s', '1000steps' or '1epoch'; '': only when the training is stopped before its end. keep: how
    many checkpoints stay. resume: 'auto' continues what `out` holds, 'never' does not; or a checkpoint's path.
    resume_changed_data: continue also where the data are others than the checkpoint's.

    best: the metric, as 'accuracy' or 'error:min', whose best weights are kept; '' keeps the last. patience:
    evaluations without a better one after which the training ends. profile: 'steps=10..20': those that torch.profiler
    traces. mesh: how the ranks are arranged.
    """

    init: Annotated[
        str | Path | None,
        Typed(Path | None),
        Option(help="Weights to start from: a safetensors file of the same model."),
    ] = None
    evaluate_every: Annotated[
        int | None, Option(help="Epochs from one evaluation to the next (by default 1); 0: only the last.", min=0)
    ] = None
    evaluate_steps: Annotated[
        int | None,
        Option(help="Optimizer steps from one evaluation to the next, instead of epochs, or besides.", min=1),
    ] = None
    best: Annotated[str, Option(help="Keep the best weights by a metric, as in accuracy, loss or error:min.")] = ""
    patience: Annotated[
        int | None, Option(help="Stop after this many evaluations without a better --best metric.", min=1)
    ] = None
    log: Annotated[
        Names,
        Typed(str, "", words="the name of a log, or a list of names"),
        Option(help="Write losses, rates, speed and evaluations: csv, tensorboard, wandb (offline), or several."),
    ] = ()
    export: Annotated[
        str | Path | None,
        Typed(Path | None),
        Option(help="Write a folder that from_pretrained loads, with the trained weights."),
    ] = None
    on_nan: Annotated[
        str,
        Option(
            "--on-nan",
            help="What to do at a loss or gradient that is NaN or infinite: stop; or skip the step on all ranks, which "
            "costs a synchronisation in each step.",
        ),
    ] = "stop"
    check_replicas: Annotated[
        int,
        Option(
            help="Steps from one comparison of the ranks' weights to the next, the last at the end; 0: none.",
            min=0,
        ),
    ] = 1000

    spot_check: Annotated[
        str,
        Option(
            metavar="every=1000",
            help="Replay a step in one process every so many, at the lowest priority; name the rank that computes "
            "something else. every=1000,stop: and end the training.",
        ),
    ] = ""

    checkpoint_every: Annotated[
        str, Option(help="Keep the training's state every so often: 500s, 1000steps or 1epoch.")
    ] = ""
    keep: Annotated[int, Option(help="How many of the newest checkpoints stay.", min=1)] = 3
    resume: Annotated[
        str | Path,
        Typed(str, "auto"),
        Option(help="auto: continue what --out holds; never; or the path of a checkpoint, or of a run."),
    ] = "auto"
    resume_changed_data: Annotated[
        bool, Option("--resume-changed-data", help="Continue also where the data are others than the checkpoint's.")
    ] = False

    profile: Annotated[
        str,
        Option(
            metavar="steps=10..20",
            help="Trace these optimizer steps, counted from 1, with torch.profiler: a file of each rank for Perfetto.",
        ),
    ] = ""

    mesh: MeshOption = ""

    @property
    def _epochs_between_evaluations(self) -> int:
        if self.evaluate_every is not None:
            return self.evaluate_every
        return 0 if self.evaluate_steps else 1

    def check_values(self) -> None:
        """Raises UserError for values that no job takes: before a batch system is given them."""
        name, _, direction = self.best.partition(":")
        if self.best and not name:
            raise UserError(f"--best {self.best}: no metric is named; give its name, as in --best accuracy")
        if direction not in ("", "min", "max"):
            raise UserError(f"--best {self.best}: '{direction}' is neither min nor max")
        if (name or self.patience) and not (self._epochs_between_evaluations or self.evaluate_steps):
            raise UserError(
                "--best and --patience need evaluations; give --evaluate-every or --evaluate-steps 1 or more"
            )
        if self.patience and not name:
            raise UserError("--patience needs a metric; name it with --best")
        for log in names(self.log, "--log"):
            if log not in LOGS:
                hint = nearest_name(log, list(LOGS))
                raise UserError(message("option_has_no_such_value", flag="--log", value=log, hint=hint))
        if self.on_nan not in ("stop", "skip"):
            raise UserError(f"--on-nan {self.on_nan}: give stop or skip")
        if self.checkpoint_every:
            _every(self.checkpoint_every)
        if self.profile:
            _profile(self.profile)
        if self.spot_check:
            _spot_check(self.spot_check)

    def plan(self, job: JobFacts) -> RunTask:
        """Returns the training to plan, without the file for its weights. Raises UserError for an unknown metric."""
        from samestep.records.plan import RunTask

        self.check_values()
        name, _, direction = self.best.partition(":")
        metrics = job.evaluation.metrics
        if name and not metrics:
            raise UserError(
                f"--best {self.best}: the job has no evaluation that computes it; give it Job(evaluation=…)"
            )
        if name and name not in metrics:
            raise UserError(f"--best {self.best}: the job has no such metric; {nearest(name, list(metrics))}")
        _check_installed(logs := names(self.log, "--log"))
        export = Path(self.export).resolve() if self.export else None
        if export:
            _check_export(export, job.model.pretrained)
        init = file_of(self.init, "--init")
        spot_check = _spot_check(self.spot_check) if self.spot_check else (0, False)
        return RunTask(
            weights="",
            init=init,
            init_sha256=digest_of(Path(init)) if init else None,
            every=self._epochs_between_evaluations,
            every_steps=self.evaluate_steps or 0,
            best=(name, direction or metrics[name]) if name else None,
            patience=self.patience,
            log=logs,
            export=str(export) if export else None,
            checkpoint_every=_every(self.checkpoint_every) if self.checkpoint_every else None,
            keep=self.keep,
            resume=_resume(str(self.resume)),
            resume_changed_data=self.resume_changed_data,
            on_nan="skip" if self.on_nan == "skip" else "stop",
            check_replicas=self.check_replicas,
            spot_check=spot_check[0],
            spot_check_stops=spot_check[1],
            profile=_profile(self.profile) if self.profile else None,
        )


def _every(text: str) -> Interval:
    """Parses '500s', '1000steps' or '1epoch'."""
    from samestep.records.checkpoint import Interval

    match = re.fullmatch(r"(\d+) ?(s|steps?|epochs?)", text)
    if not match or not int(match[1]):
        raise UserError(f"--checkpoint-every {text}: write seconds, steps or epochs, as in 500s, 1000steps or 1epoch")
    unit: Literal["s", "steps", "epochs"] = "s" if match[2] == "s" else "steps" if match[2][0] == "s" else "epochs"
    return Interval(int(match[1]), unit)


def _profile(text: str) -> tuple[int, int]:
    """Parses 'steps=10..20', or 'steps=10'."""
    match = re.fullmatch(r"steps=(\d+)(?:\.\.(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not first or last < first:
        raise UserError(
            f"--profile {text}: write the first and the last step, counted from 1, as in --profile steps=10..20"
        )
    return first, last


def _spot_check(text: str) -> tuple[int, bool]:
    """Parses 'every=1000', or 'every=1000,stop'. Returns the steps, and whether one that differs ends the training."""
    match = re.fullmatch(r"every=([1-9]\d{0,11})(,stop)?", text)
    if not match:
        raise UserError(
            f"--spot-check {text}: write the steps from one to the next, as in --spot-check every=1000, or "
            "every=1000,stop to end the training where one differs"
        )
    return int(match[1]), bool(match[2])


def _resume(text: str) -> str:
    """Returns 'auto', 'never', or an absolute path."""
    if text in ("auto", "never"):
        return text
    if not Path(text).is_dir():
        raise UserError(f"--resume {text}: there is no such folder; give auto, never, or the folder of a checkpoint")
    from samestep.records.checkpoint import FOLDER, MANIFEST, steps_in

    folder = Path(text).resolve()
    if not ((folder / MANIFEST).exists() or steps_in(folder) or steps_in(folder / FOLDER)):
        raise UserError(f"--resume {folder} holds no checkpoint; give a run's folder, or one of its step-… folders")
    return str(folder)


def _check_export(folder: Path, modules: tuple[str, ...]) -> None:
    """Raises UserError where --export has not exactly one module to write.

    modules: the names of those that have save_pretrained.
    """
    if not modules:
        raise UserError(
            f"--export {folder}: neither the job's model nor a module of it has save_pretrained, as those of "
            "transformers and peft have; leave it out: weights.safetensors is written all the same"
        )
    if len(modules) > 1:
        raise UserError(
            f"--export {folder}: {len(modules)} modules of the model have save_pretrained "
            f"({first_few(list(modules))}), and a folder holds one; leave it out, and call save_pretrained on the one "
            "that you need, with the weights of weights.safetensors"
        )
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, and would be replaced; give a folder with --export")
    if foreign := other_file(folder):
        raise UserError(
            f"--export {folder}: {foreign} in it is of no export of samestep, and would be removed; give a new folder"
        )
    # Folders above it are made with it, as those of --out.
    existing = next(above for above in folder.resolve().parents if above.exists())
    _check_writable(existing / folder.name, "--export", f"{existing} is a file; give a folder in another one")


def _check_installed(logs: tuple[str, ...]) -> None:
    """Raises UserError where a log's package is not installed."""
    for name in logs:
        if LOGS[name] and find_spec(LOGS[name]) is None:
            raise UserError(
                f"--log {name} needs the package {LOGS[name]}, which is not installed: pip install 'samestep[{name}]'"
            )


@dataclass(frozen=True)
class ScoreOptions(Options):
    """The options of an evaluation. weights: a safetensors file. predictions: the .npy file for the model's outputs."""

    weights: Annotated[str | Path, Typed(Path), Option(help="The weights.safetensors of a run.")]
    _: KW_ONLY
    predictions: Annotated[
        str | Path | None,
        Typed(Path | None),
        Option(help="Keep the model's output for each row, in the dataset's order, as a .npy file."),
    ] = None

    def plan(self, job: JobFacts) -> EvaluateTask:
        """Returns the evaluation to plan. Raises UserError for a job without one, or a file that cannot be written."""
        from samestep.records.plan import EvaluateTask

        if not job.evaluation.rows:
            raise UserError("the job has no evaluation; give it one: Job(evaluation=…)")
        predictions = Path(self.predictions) if self.predictions else None
        if predictions is not None:
            _check_predictions(predictions)
        init = str(file_of(self.weights, "--weights"))
        return EvaluateTask(init, digest_of(Path(init)), str(predictions.resolve()) if predictions else None)


def _check_predictions(file: Path) -> None:
    if file.exists():
        raise UserError(f"{file} exists, and would be replaced; give another name with --predictions")
    if file.suffix != ".npy":
        raise UserError(f"--predictions {file}: give a file that ends in .npy, in an existing folder")
    _check_writable(file, "--predictions", "give a file that ends in .npy, in an existing folder")


def _check_writable(path: Path, flag: str, instead: str) -> None:
    """Raises UserError where the folder that is to hold `path` does not exist, or takes no files."""
    if not path.resolve().parent.is_dir():
        raise UserError(f"{flag} {path}: {instead}")
    try:
        tempfile.TemporaryFile(dir=path.resolve().parent).close()
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be written: {error.strerror}; name another") from None


def file_of(path: str | Path | None, flag: str) -> str | None:
    """Returns the absolute path of the weights that a flag names. Raises UserError for a file that holds none."""
    if not path:
        return None
    if not Path(path).is_file():
        raise UserError(f"{flag} {path}: there is no such file; give the weights.safetensors of a run")
    from safetensors import SafetensorError, safe_open

    try:
        safe_open(path, framework="numpy")  # reads the header
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{flag} {path} cannot be read as safetensors ({error}); give the weights.safetensors of a run"
        ) from None
    return str(Path(path).resolve())


def digest_of(file: Path) -> str:
    """Returns the SHA-256 of a file."""
    state = hashlib.sha256()
    with open_regular(file) as content:
        while block := content.read(1 << 20):
            state.update(block)
    return state.hexdigest()
