"""Checks the values that a Job is made of; each error names what to write instead, also for other libraries' names."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from samestep.errors import UserError, nearest


def nested(dataset: Any) -> Iterator[Any]:
    """Yields a dataset and those that it wraps, as Subset does: its `dataset`, the `dataset` of that, …"""
    found: set[int] = set()  # a dataset that wraps itself would never end
    while dataset is not None and id(dataset) not in found:
        found.add(id(dataset))
        yield dataset
        dataset = getattr(dataset, "dataset", None)


def check_dataset(name: str, dataset: Any) -> None:
    """Raises UserError for a dataset without a length or rows by index. name: 'train' or 'evaluation'."""
    kind = type(dataset).__name__
    if instead := _dataset_inside(name, dataset):
        raise UserError(f"{name} is {shown(dataset)}; {instead}")
    iterable = any(base.__name__ == "IterableDataset" for base in type(dataset).__mro__)
    if iterable or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UserError(
            f"{name} is {shown(dataset)}, which has no length or no rows by index; give a map-style "
            "dataset with __len__ and __getitem__, or wrap an iterable one: "
            "samestep.Stream(dataset, length=…), with Job(shuffle=False)"
        )
    try:
        rows = len(dataset)
    except Exception as error:
        raise UserError(f"the length of {name}, a {kind}, cannot be read: {type(error).__name__}: {error}") from error
    if rows == 0:
        raise UserError(f"the {name} dataset has no rows" + ("; leave it out (None)" if name != "train" else ""))


def _dataset_inside(name: str, dataset: Any) -> str:
    """Returns what to give instead of something that holds, loads or names a dataset; '' for a dataset."""
    if is_a(dataset, "DataLoader"):
        return (
            f"each rank makes its own batches: give {name}=loader.dataset, its batch_size as part of global_batch, and "
            "its collate_fn, where it has one, as collate"
        )
    if isinstance(dataset, type):
        return f"give one that is built: {name}={dataset.__name__}(…)"
    if isinstance(dataset, str | bytes | os.PathLike):
        return f"give the dataset that is read from there, such as {name}=torchvision.datasets.ImageFolder(path)"
    if isinstance(dataset, Mapping):
        keys = [key for key in dataset if isinstance(key, str)]
        split = next((key for key in keys if key.startswith(name[:4])), keys[0] if keys else "train")
        return (
            f'give one of its datasets, {name}=data["{split}"], or columns as rows: '
            f"{name}=TensorDataset(inputs, targets)"
        )
    if isinstance(dataset, tuple | list) and len(dataset) in (2, 3):
        rows = [len(column) if getattr(column, "shape", ()) else 0 for column in dataset]
        if len(set(rows)) == 1 and rows[0] > len(dataset):
            return f"columns are no rows: write {name}=TensorDataset(inputs, targets)"
    if hasattr(dataset, "iloc"):  # of pandas, whose [0] is a column
        return f"write {name}=TensorDataset(torch.tensor(frame[columns].values), torch.tensor(frame[label].values))"
    return ""


CALLED = {
    "forward": "forward=lambda model, batch: model(batch.inputs)",
    "collate": "collate=lambda samples: torch.stack(samples)",
    "evaluation_collate": "evaluation_collate=torch.utils.data.default_collate",
    "augment": "augment=lambda sample, generator: sample",
    "weight": "weight=lambda index: float(weights[index])",
    "evaluation_weight": "evaluation_weight=lambda index: float(weights[index])",
    "on_step": "on_step=lambda info: print(info)",
    "on_evaluation": "on_evaluation=lambda step, metrics: print(step, metrics)",
}


def check_calls(values: Mapping[str, Any]) -> None:
    """Raises UserError with the line to write where one of these fields of a Job is no function."""
    for name, value in values.items():
        if not (callable(value) or (value is None and name != "forward")):
            raise UserError(f"{name} is {shown(value)}; it is a function: write {CALLED[name]}")


def check_workers(workers: int) -> None:
    """Raises UserError for more loader processes than a machine of so many cores can start."""
    cores = os.cpu_count() or 1
    if workers > 64 * cores:
        raise UserError(f"workers is {workers}; this machine has {cores} cores: give at most 64 for each")


def is_a(value: Any, name: str) -> bool:
    """Whether `value` is an instance of torch's class `name`. A job is checked without importing torch."""
    return any(base.__name__ == name and base.__module__.startswith("torch.") for base in type(value).__mro__)


def shown(value: Any) -> str:
    """Returns what a value is, for a sentence: 'the class SGD', 'a function', 'an instance of Net', …"""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return "a function"
    return (
        repr(value)
        if value is None or isinstance(value, str | int | float)
        else f"an instance of {type(value).__name__}"
    )


def check_optimizer(optimizer: Any, recipe: bool) -> None:
    """Raises UserError with the line to write where a Job's optimizer is no Recipe of a class and its settings.

    recipe: whether it is a Recipe.
    """
    given = optimizer.cls if recipe else optimizer
    if recipe and isinstance(given, type) and isinstance(optimizer.settings, Mapping):
        return
    built = is_a(given, "Optimizer")
    cls = given if isinstance(given, type) else type(given) if built else None
    name = cls.__name__ if cls else "AdamW"
    known = cls is None or cls.__module__.startswith("torch.optim")
    lr = given.defaults.get("lr", 1e-3) if built else 1e-3
    if recipe and isinstance(given, type):
        what = f"the optimizer's settings are {shown(optimizer.settings)}, not a dict"
    else:
        what = f"optimizer is {'a Recipe of ' if recipe else ''}{shown(given)}"
    raise UserError(
        f"{what}; each engine builds the optimizer itself, some after they have sharded the model: write "
        f'optimizer=Recipe({"torch.optim." if known else ""}{name}, {{"lr": {float(lr):g}}})'
    )


def check_metrics(metrics: Any) -> None:
    """Raises UserError where the metrics of a Job are no functions with names."""
    if hasattr(metrics, "update") and hasattr(metrics, "compute"):
        raise UserError(f"metrics is {shown(metrics)}; give it a name: metrics={{'{type(metrics).__name__}': metric}}")
    named = isinstance(metrics, Mapping) and all(isinstance(name, str) for name in metrics)
    for name, metric in metrics.items() if named else ():
        if hasattr(metric, "update") and hasattr(metric, "compute") and not hasattr(metric, "reset"):
            raise UserError(
                f"the metric '{name}' is {shown(metric)}, which is updated in one evaluation after another and has no "
                "reset(); write one, which forgets all rows"
            )
    wrong = next((value for value in metrics.values() if not _is_metric(value)), None) if named else metrics
    if not named or wrong is not None:
        raise UserError(
            f"{'a metric' if named else 'metrics'} is {shown(wrong)}; give functions with names, as in "
            "metrics={'accuracy': lambda output, batch: output.argmax(1) == batch.targets}"
        )


def _is_metric(value: Any) -> bool:
    return callable(value) or (hasattr(value, "update") and hasattr(value, "compute"))


def check_functions(model: Any, criterion: Any) -> None:
    """Raises UserError with the line to write where a Job has a module, or one of torch's losses, for a function."""
    if is_a(model, "Module") or not callable(model):
        raise UserError(
            f"model is {shown(model)}; engines build it, each time with the same weights: write a function, "
            "def model(): torch.manual_seed(0); return Net()"
        )
    cls = criterion if isinstance(criterion, type) else type(criterion)
    name = cls.__name__ if cls.__module__.startswith("torch.nn") else getattr(criterion, "__name__", "")
    call = ""
    if cls.__module__ == "torch.nn.modules.loss":
        call = f"nn.{name}()"
    elif getattr(criterion, "__module__", None) == "torch.nn.functional":
        call = f"F.{name}"
    if call or not callable(criterion):
        raise UserError(
            f"criterion is {call or shown(criterion)}, and is called with (output, batch), not with the targets: "
            f"write criterion=lambda output, batch: {call or 'F.cross_entropy'}(output, batch.targets)"
        )


def check_carried(default_forward: bool, in_lanes: bool, last: str, closure: bool) -> None:
    """Raises UserError with the line to write where a Job with carry_state cannot carry a state.

    default_forward: whether the job has no forward of its own. in_lanes: whether its order may be one of lanes.
    closure: whether its optimizer computes the loss of a step several times.
    """
    if closure:
        raise UserError(
            "carry_state=True: the optimizer computes the loss of a step several times, each time with another state; "
            "use one that steps from gradients, such as AdamW"
        )
    if default_forward:
        raise UserError(
            "carry_state=True: the default forward does not give the model its state; write "
            "forward=lambda model, batch: model(batch.inputs, batch.state)"
        )
    if not in_lanes:
        raise UserError(
            "carry_state=True: a row continues the row at its place in the step before, and this job's rows are "
            "shuffled; give Job(order=Lanes()), or shuffle=False where the dataset has that order"
        )
    if last != "drop":
        raise UserError(
            "carry_state=True: the rows of an incomplete last step continue none; give Job(last='drop'), which leaves "
            "them out"
        )


_BATCH = "give global_batch=…, the rows of one step over all ranks: rows of a rank × ranks × accumulation steps"
_MICRO = "give micro_batch=…, the most rows that a rank takes at once; its gradients add up to global_batch"
_RECIPE = 'the optimizer has it: write optimizer=Recipe(torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.01})'
_CRITERION = "write criterion=lambda output, batch: F.cross_entropy(output, batch.targets)"
_SCHEDULER = "write scheduler=LRSchedule(lambda optimizer: CosineAnnealingLR(optimizer, 100))"
_COMMAND = "a job does not say where it runs; the command does: samestep run my_job.py --engine ddp --nproc 2"
_PRECISION = "a job does not say its precision; an engine does: samestep run my_job.py --engine amp"
_CALLED = "give on_step=(StepInfo) -> None, or on_evaluation=(step, metrics) -> None"

HINTS = {
    _BATCH: "batch batch_size train_batch_size per_device_train_batch_size bs batchsize",
    _MICRO: "micro_batch_size accumulate_grad_batches gradient_accumulation_steps accumulation_steps grad_accum",
    _RECIPE: "lr learning_rate weight_decay momentum betas",
    _CRITERION: "loss loss_fn loss_function criterion_fn compute_loss objective",
    _SCHEDULER: "lr_scheduler schedule lr_schedule schedulers",
    _COMMAND: "device devices accelerator gpus strategy num_nodes nproc world_size engine backend num_processes",
    _PRECISION: "precision fp16 bf16 amp mixed_precision dtype",
    _CALLED: "callbacks callback hooks logger",
    "write optimizer=Recipe(torch.optim.AdamW, {…})": "optim optimizers optimizer_class configure_optimizers",
    "give train=…, a dataset: not its DataLoader": (
        "train_dataset dataset data train_data trainset training dataloader loader train_dataloader train_loader "
        "train_dataloaders x X"
    ),
    "give evaluation=…, a dataset: not its DataLoader": (
        "val valid validation val_dataset eval_dataset valid_dataset val_data validation_data eval test test_dataset "
        "testset valset val_dataloader val_dataloaders val_loader test_loader eval_dataloader"
    ),
    "give epochs=…": "num_epochs max_epochs n_epochs nb_epochs num_train_epochs epoch",
    "give max_steps=…": "steps max_iters num_steps max_iterations iterations num_training_steps total_steps",
    "give clip_norm=…": "gradient_clip_val max_grad_norm grad_clip clip_grad_norm gradient_clipping clip",
    "give workers=…": "num_workers dataloader_num_workers n_workers",
    "give prefetch=…": "prefetch_factor",
    "give collate=…": "collate_fn data_collator collator",
    "give augment=(sample, generator) -> sample, or let the dataset do it": "transform transforms augmentation",
    "give order=…: Weighted, ByLength, Lanes() or (epoch, generator) -> indices": "sampler batch_sampler",
    'give last="drop", or "keep"': "drop_last dataloader_drop_last",
    "give metrics={'accuracy': lambda output, batch: output.argmax(1) == batch.targets}": (
        "metric compute_metrics metric_fn eval_metrics"
    ),
    "give model=…, a function that builds it": "net network module model_init build_model",
    "give forward=lambda model, batch: …": "forward_fn training_step step_fn",
    "give seed=…": "random_seed random_state manual_seed",
    "give ema=…, its decay": "ema_decay model_ema",
    "give weight=(index) -> float": "sample_weight sample_weights weights",
}


def refuse_unknown(cls: type, given: Iterable[str]) -> None:
    """Raises UserError for an argument that Job has not, with what it is called here."""
    known = [field.name for field in fields(cls)]
    for name in given:
        if name not in known:
            hint = next((hint for hint, names in HINTS.items() if name in names.split()), nearest(name, known))
            raise UserError(f"Job has no argument '{name}'; {hint}")


def refuse_settings(cls: type, values: Sequence[Any], named: Mapping[str, Any], right: str) -> None:
    """Raises UserError with the line to write where a Recipe or an LRSchedule is given the settings of torch's class as
    its own. right: the line, with the name of torch's class and the settings in its braces."""
    unknown = {name: value for name, value in named.items() if name not in {field.name for field in fields(cls)}}
    if unknown:
        given = next(iter([*values, *named.values()]))
        line = right.format(
            cls=getattr(given, "__name__", "cls"),
            named=", ".join(f"{name}={value!r}" for name, value in unknown.items()),
            quoted=", ".join(f'"{name}": {value!r}' for name, value in unknown.items()),
        )
        raise UserError(f"{cls.__name__} has no argument '{next(iter(unknown))}'; write {cls.__name__}({line})")
