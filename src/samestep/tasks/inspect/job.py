"""What the parent asks a worker before any launch: a job's sizes and faults, and which engines run here."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import IterableDataset

from samestep import engine as engines
from samestep.data.loader import Rows, most_workers, workers_of
from samestep.data.schedule import schedule_of
from samestep.data.stream import is_stream
from samestep.errors import UserError, nearest
from samestep.job import Batch, Job
from samestep.run import digest_state, one_row_sentence
from samestep.tasks.inspect.dry_step import probe, probe_evaluation
from samestep.tasks.inspect.load import build, find, innermost, settings_of, values_of
from samestep.tasks.proof_job import Training, proof_job
from samestep.world import World


def inspect_job(target: str, settings: dict[str, str], replicas: int, steps: int, device: str) -> dict[str, Any]:
    """A job's settings and sizes, and what its layers refuse, with 1 and with `replicas` replicas.

    Raises UserError for a job that no engine could train, or that no proof could speak about.
    """
    function = find(target)
    job = build(target, settings)
    _check_numbers(job)
    model = _model(job)
    parameters = list(model.parameters())
    if not any(p.requires_grad for p in parameters):
        raise UserError(f"the model of the job {target} has no parameters to train; return a module that has some")
    first, second = digest_state(model), digest_state(_model(job))
    if first != second:
        raise UserError(
            f"the model of the job {target} differs from call to call, so no two trainings of it could be compared; "
            "seed it inside: def model(): torch.manual_seed(seed); return Net()"
        )
    unused = probe(job, schedule_of(job, 1), _model(job), device)
    probe_evaluation(job, _model(job), device)
    training = Training("sgd", steps, "float32", replicas)
    return {
        "settings": settings_of(function),
        "source": _source_digest(function),
        "chosen": {name: str(value) for name, value in settings.items()},
        "rows": len(job.train),
        "evaluation_rows": 0 if job.evaluation is None else len(job.evaluation),
        "metrics": {}
        if job.evaluation is None
        else {"loss": "min"} | {name: _better(metric) for name, metric in job.metrics.items()},
        "global_batch": job.global_batch,
        "micro_batches": {str(n): schedule_of(job, n).micro_batches for n in sorted({1, replicas})},
        "steps_per_epoch": schedule_of(job, 1).steps_per_epoch,
        "epochs": job.epochs,
        "parameters": sum(p.numel() for p in parameters),
        "dtype": str(next(p.dtype for p in parameters)).removeprefix("torch."),
        "optimizer": job.optimizer.cls.__name__,
        "workers": workers_of(job),
        "most_workers": most_workers(job),
        "prefetch": job.prefetch,
        "last": job.last,
        "sync_batchnorm": job.sync_batchnorm,
        "batch_layers": _layers(model, nn.modules.batchnorm._BatchNorm),
        "unused": unused,
        "scalars": [name for name, parameter in model.named_parameters() if parameter.dim() == 0],
        "random_layers": _layers(model, nn.modules.dropout._DropoutNd),
        "refused": {
            str(n): _refusal(job, n) or _refusal(proof_job(job, replace(training, replicas=n)), n)
            for n in sorted({1, replicas})
        },
    }


def _better(metric: Any) -> str:
    """Whether a metric is good when it is high ('max') or low ('min'); torchmetrics' own know."""
    return "min" if getattr(metric, "higher_is_better", True) is False else "max"


def _layers(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    return [name or type(module).__name__ for name, module in model.named_modules() if isinstance(module, kind)]


def _source_digest(function: Callable[..., Any]) -> str:
    """A digest of the job's file and of the neighbours that it imports: a changed job is another question."""
    home = Path(inspect.getfile(innermost(function))).resolve().parent
    files = {
        Path(str(module.__file__)).resolve()
        for module in list(sys.modules.values())
        if getattr(module, "__file__", None)
    }
    state = hashlib.blake2b(digest_size=8)
    for file in sorted(f for f in files if f.is_relative_to(home) and "site-packages" not in f.parts and f.is_file()):
        state.update(file.read_bytes())
    return state.hexdigest()


def _model(job: Job) -> nn.Module:
    try:
        model = job.model()
    except (Exception, SystemExit) as error:
        raise UserError(f"the job's model() raised: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise UserError(f"the job's model() returned {type(model).__name__}, not a torch.nn.Module")
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(parameter):
            raise UserError(
                f"the size of {name} is not known until rows come; give its layer its input size, not Lazy…"
            )
    return model


def _check_numbers(job: Job) -> None:
    for name, dataset in (("train", job.train), ("evaluation", job.evaluation)):
        if dataset is None and name == "evaluation":
            continue
        iterable = isinstance(dataset, IterableDataset)
        if iterable or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise UserError(
                f"{name} is a {type(dataset).__name__}, which has no length or no rows by index; give a map-style "
                "dataset with __len__ and __getitem__, or wrap what is read from its beginning: "
                "samestep.Stream(dataset, length=…), with Job(shuffle=False)"
            )
        if name == "train" and is_stream(dataset) and job.shuffle:
            raise UserError("a Stream has one order, its own; say that it is not to be shuffled: Job(shuffle=False)")
        try:
            rows = len(cast(Sized, dataset))
        except Exception as error:
            kind = type(dataset).__name__
            raise UserError(
                f"the length of {name}, a {kind}, cannot be had: {type(error).__name__}: {error}"
            ) from error
        if rows == 0:
            raise UserError(f"the {name} dataset has no rows" + ("; leave it out (None)" if name != "train" else ""))
    for name in ("global_batch", "epochs", "micro_batch", "clip_norm", "prefetch"):
        value = getattr(job, name)
        if name != "clip_norm" and value is not None and not isinstance(value, int):
            raise UserError(f"{name} is {value!r}, a {type(value).__name__}; it must be a whole number")
        if value is not None and not value > 0:
            raise UserError(f"{name} is {value}; it must be above 0")
    weigh, evaluation = job.evaluation_weight, job.evaluation
    if weigh and evaluation is not None and not any(weigh(index) > 0 for index in range(len(evaluation))):
        raise UserError("the evaluation's rows all weigh 0; its loss is a mean, which needs a weight above 0")
    if not isinstance(job.workers, int) or job.workers < 0:
        raise UserError(f"workers is {job.workers!r}; it must be a whole number, 0 or above")
    for name in {"loss", "step"} & {*job.metrics}:
        raise UserError(f"a metric is called '{name}', which the curve has already; give it another name")
    if job.last not in ("keep", "drop"):
        raise UserError(f"last is '{job.last}'; it must be 'keep' or 'drop'")
    if job.scheduler is not None and job.scheduler.every not in ("step", "epoch"):
        raise UserError(f"the scheduler's every is '{job.scheduler.every}'; it must be 'step' or 'epoch'")
    if schedule_of(job, 1).steps_per_epoch == 0:
        raise UserError(
            f"last=drop leaves no step: the dataset has {len(job.train)} rows, fewer than global_batch "
            f"{job.global_batch}; set a smaller global_batch or last=keep"
        )


def _refusal(job: Job, replicas: int) -> str | None:
    """The sentence about the smallest part of an epoch, if a layer refuses its one row, or that there is none."""
    synced = job.sync_batchnorm and replicas > 1
    rows, step, rank = schedule_of(job, replicas).smallest_part()
    if synced and (empty := schedule_of(job, replicas).without_rows()):
        return (
            f"step {empty[0]}: rank {empty[1]} gets no rows, and SyncBatchNorm would count others' twice; "
            "set global_batch=… so that every rank gets some, or last=drop"
        )
    if rows > 1 or synced:
        return None
    part = next(p for p in schedule_of(job, 1).step(0, 0, 0))
    part = replace(part, indices=part.indices[:1], rows=1)
    _, data = Rows(job)[part]
    try:
        job.forward(job.model(), Batch(data, part))
    except ValueError as error:
        if "more than 1 value per channel" in str(error):
            return one_row_sentence(step, rank)
    except Exception:
        return None  # whatever else is wrong shows when it trains, with its own message
    return None


def inspect_engines(
    devices: tuple[str, ...], nproc: int, given: Mapping[str, str], asked: Sequence[str]
) -> list[dict[str, Any]]:
    """Every engine: whether it runs on these devices, the reason when not, the line that installs it, its settings, and
    how it would lay `nproc` replicas out.

    given: texts of --set-engine; 'key' is for every engine that has it, 'engine.key' for one. Raises UserError for a
    key that none of the engines `asked` has (all where none is asked), and for a value that does not fit.
    """
    rows, had = [], set()
    for name in engines.names():
        said = "does not import"
        try:
            engine = engines.load(name)
            said = "does not answer"
            known = _settings(engine)
            texts = {}
            for place, text in given.items():
                whose, _, key = place.rpartition(".")
                if (whose == name or not whose) and key in known and (name in asked or not asked):
                    texts[key] = text
                    had.add(place)
            chosen = values_of(engine.train, texts, f"the engine {name}", "--set-engine") if texts else {}
            row = _engine(name, engine, devices, nproc, known, chosen)
            json.dumps(row)  # what it says must reach the parent
        except UserError:
            raise  # about a value of --set-engine
        except (Exception, SystemExit) as error:  # a broken engine of another package must not break the rest
            words = (str(error).strip().splitlines() or [""])[0]
            row = _broken(name, f"{said}: {type(error).__name__}: {words}")
        rows.append(row)
    rows += [_broken(name, "its name is that of an engine of samestep's") for name in engines.impostors()]
    for place in given:
        if place not in had:
            every = {f"{row['name']}.{key}" for row in rows for key in row["settings"]}
            listed = sorted(key for key in every if not asked or key.partition(".")[0] in asked)
            known_keys = nearest(place, listed) if listed else "they have no settings"
            raise UserError(f"--set-engine {place}: none of the engines asked for has this setting; {known_keys}")
    return rows


def _settings(engine: engines.Engine) -> dict[str, Any]:
    """The settings of an engine and their defaults: the keyword arguments of its train()."""
    parameters = inspect.signature(engine.train).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def _broken(name: str, reason: str) -> dict[str, Any]:
    row = dict.fromkeys(("install", "version", "layout", "numerics"))
    return {
        "name": name,
        "available": False,
        "reason": reason,
        "purpose": "",
        "process_kind": "",
        "settings": {},
        **row,
    }


def _engine(
    name: str,
    engine: engines.Engine,
    devices: tuple[str, ...],
    nproc: int,
    known: Mapping[str, Any],
    chosen: Mapping[str, Any],
) -> dict[str, Any]:
    reason = engines.missing(engine, devices)
    alone = engine.PROCESSES == "one"
    world = World(devices=devices[:nproc]) if alone else World(size=nproc, devices=devices[:1])
    package = engine.NEEDS[0] if engine.NEEDS else "torch"
    try:
        found: str | None = version(package)
    except PackageNotFoundError:
        found = None
    settings = {**known, **chosen}
    return {
        "name": name,
        "available": reason is None,
        "reason": reason,
        "install": getattr(engine, "INSTALL", None) or f"pip install {_requirements(name, engine.NEEDS)}",
        "version": found,
        "purpose": engine.PURPOSE,
        "process_kind": engine.PROCESSES,
        "processes": world.size,
        "devices": list(devices[:nproc] if alone else devices),
        "settings": settings,
        "chosen": {key: value for key, value in chosen.items() if value != known[key]},
        "layout": asdict(engine.layout(world, **settings)),
        "numerics": asdict(engine.numerics(**settings)),
    }


def _requirements(extra: str, needs: Sequence[str]) -> str:
    """What samestep's own metadata ask for under `extra`, quoted; of another package's engine, the modules it needs."""
    try:
        asked = [text.partition(";") for text in requires("samestep") or []]
    except PackageNotFoundError:
        asked = []
    wanted = [what.strip() for what, _, marker in asked if re.search(rf"extra == ['\"]{extra}['\"]", marker)]
    return " ".join(f"'{what}'" if re.search("[<>=]", what) else what for what in wanted or needs or ["torch"])


def find_devices(wanted: str) -> tuple[str, ...]:
    """'auto', 'cpu', 'cuda' or a list such as 'cuda:0,cuda:1' as the devices of this machine."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and gpus == 0):
        return ("cpu",)
    if wanted in ("auto", "cuda"):
        if gpus == 0:
            raise UserError("--device cuda: this machine shows no CUDA device to torch; use --device cpu")
        return tuple(f"cuda:{i}" for i in range(gpus))
    devices = tuple(wanted.split(","))
    for device in devices:
        try:
            index = torch.device(device).index
            known = device == "cpu" or (device.startswith("cuda:") and index is not None and index < gpus)
        except RuntimeError:
            known = False
        if not known:
            raise UserError(f"--device {wanted}: there is no device '{device}' here; torch sees {gpus} CUDA devices")
    return devices
