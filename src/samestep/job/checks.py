"""Checks the values that a Job is made of; each error names what to write instead, also for other libraries' names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from numbers import Real
from typing import Any

from samestep.errors import UserError, nearest
from samestep.job.batch import apply_to_inputs, counts_by_itself
from samestep.job.fields import JobFields
from samestep.job.function_checks import check_functions, check_optimizer, is_of_torch, shown
from samestep.job.orders import ByLength, Lanes, Weighted
from samestep.job.phases import LRSchedule, Recipe


def check_job(job: JobFields) -> None:
    """Raises UserError for a value that a Job cannot have, and for values that do not go together."""
    check_optimizer(job.optimizer, isinstance(job.optimizer, Recipe))
    check_functions(job.model, job.criterion)
    check_dataset("train", job.train)
    if job.evaluation is not None:
        check_dataset("evaluation", job.evaluation)
    if job.shuffle and any(getattr(dataset, "one_order", False) for dataset in nested(job.train)):
        raise UserError("a Stream cannot be shuffled: it is read in its order; set Job(shuffle=False)")
    check_calls({name: getattr(job, name) for name in CALLED})
    for name in ("global_batch", "epochs", "max_steps", "micro_batch", "clip_norm", "prefetch", "seed"):
        value = getattr(job, name)
        kind: Any = Real if name == "clip_norm" else int
        may_be_none = name in ("max_steps", "micro_batch", "clip_norm")
        if not (value is None and may_be_none) and (not isinstance(value, kind) or isinstance(value, bool)):
            words = "a number" if kind is Real else "a whole number"
            given = repr(value) if isinstance(value, Real) else shown(value)
            raise UserError(f"{name} is {given}, a {type(value).__name__}; it must be {words}")
        if value is not None and not value > 0 and name != "seed":
            rows = ": it is the rows of one step, over all ranks" if name == "global_batch" else ""
            raise UserError(f"{name} is {value}; it must be above 0{rows}")
    if not isinstance(job.workers, int) or job.workers < 0:
        raise UserError(f"workers is {job.workers!r}; it must be a whole number, 0 or above")
    check_workers(job.workers)
    if job.gather_outputs and job.micro_batch is not None:
        raise UserError(
            f"micro_batch is {job.micro_batch}, and gather_outputs=True computes the loss over all rows of a step "
            "at once; leave out one of them"
        )
    if job.batch_weight and (job.weight or job.gather_outputs):
        option = "weight" if job.weight else "gather_outputs=True"
        raise UserError(f"batch_weight and {option} each say what a batch weighs in the mean; leave out one of them")
    check_metrics(job.metrics)
    for name in {"loss", "step"} & {*job.metrics}:
        raise UserError(
            f"a metric is called '{name}', a name that the evaluation curve uses itself; give it another name"
        )
    if job.last not in ("keep", "drop"):
        raise UserError(f"last is '{job.last}'; it must be 'keep' or 'drop'")
    if job.save not in ("all", "trainable"):
        raise UserError(f"save is '{job.save}'; it must be 'all' or 'trainable'")
    if job.ema is not None and not (isinstance(job.ema, Real) and 0 < job.ema < 1):
        raise UserError(f"ema is {shown(job.ema)}; it is a decay between 0 and 1, such as 0.999")
    check_parallel(job.parallel)
    _check_scheduler(job)
    _check_order(job)


def _check_order(job: JobFields) -> None:
    if job.order is not None and not job.shuffle:
        raise UserError("order and shuffle=False each say the order of the rows; leave out one of them")
    if isinstance(job.order, Weighted | ByLength):
        job.order.check(len(job.train))
    elif job.order is not None and not isinstance(job.order, Lanes) and not callable(job.order):
        kind = type(job.order).__name__
        raise UserError(
            f"order is a {kind}; give Weighted, ByLength, Lanes() or a function (epoch, generator) -> indices"
        )
    if job.carry_state:
        in_lanes = not (job.order is None or isinstance(job.order, Weighted | ByLength)) or not job.shuffle
        if job.phases:
            raise UserError(
                "carry_state=True with phases: each phase would take the state of the one before it; leave out one"
            )
        check_carried(job.forward is apply_to_inputs, in_lanes, job.last, job.optimizer.needs_closure)
    if job.last == "drop" and job.order is None and len(job.train) < job.global_batch:
        raise UserError(
            f"last=drop leaves no step: the dataset has {len(job.train)} rows, fewer than global_batch "
            f"{job.global_batch}; set a smaller global_batch or last=keep"
        )


def _check_scheduler(job: JobFields) -> None:
    if job.scheduler is None:
        return
    if not isinstance(job.scheduler, LRSchedule):
        raise UserError(
            f"scheduler is {shown(job.scheduler)}; it is built with the optimizer: write "
            "scheduler=LRSchedule(lambda optimizer: CosineAnnealingLR(optimizer, 100))"
        )
    if not callable(job.scheduler.make):
        raise UserError(
            f"LRSchedule is given {shown(job.scheduler.make)}; give a function of the optimizer: "
            "LRSchedule(lambda optimizer: CosineAnnealingLR(optimizer, 100))"
        )
    every, metric = job.scheduler.every, job.scheduler.metric
    if every not in ("step", "epoch", "evaluation"):
        raise UserError(f"the scheduler's every is '{every}'; it must be 'step', 'epoch' or 'evaluation'")
    if every == "evaluation" and job.evaluation is None:
        raise UserError("the scheduler's every is 'evaluation', and the job has none; give it Job(evaluation=…)")
    if every == "evaluation" and metric not in ("loss", *job.metrics):
        raise UserError(f"the scheduler's metric is '{metric}'; {nearest(metric, ['loss', *job.metrics])}")


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
    if is_of_torch(dataset, "DataLoader"):
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
    "batch_weight": "batch_weight=lambda batch: (batch.targets != -100).sum()",
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


def check_metrics(metrics: Any) -> None:
    """Raises UserError where the metrics of a Job are no functions with names."""
    if counts_by_itself(metrics):
        raise UserError(f"metrics is {shown(metrics)}; give it a name: metrics={{'{type(metrics).__name__}': metric}}")
    named = isinstance(metrics, Mapping) and all(isinstance(name, str) for name in metrics)
    for name, metric in metrics.items() if named else ():
        if counts_by_itself(metric) and not hasattr(metric, "reset"):
            raise UserError(
                f"the metric '{name}' is {shown(metric)}, which is updated in one evaluation after another and has no "
                "reset(); write one, which forgets all rows"
            )
    values = metrics.values() if named else ()
    wrong = next((v for v in values if not (callable(v) or counts_by_itself(v))), None) if named else metrics
    if not named or wrong is not None:
        raise UserError(
            f"{'a metric' if named else 'metrics'} is {shown(wrong)}; give functions with names, as in "
            "metrics={'accuracy': lambda output, batch: output.argmax(1) == batch.targets}"
        )


PARALLEL_STYLES = ("colwise", "colwise_2", "colwise_3", "rowwise", "colwise_gather", "stage")


def check_parallel(parallel: Any) -> None:
    """Raises UserError where `parallel` does not map names of layers to styles."""
    if parallel is None:
        return
    write = 'write parallel={"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "blocks.2": "stage"}'
    if not isinstance(parallel, Mapping):
        raise UserError(f"parallel is {shown(parallel)}; it maps the names of layers to how ranks divide them: {write}")
    for layer, style in parallel.items():
        if not isinstance(layer, str):
            raise UserError(f"parallel has the key {shown(layer)}; a key is the name of a layer: {write}")
        if style not in PARALLEL_STYLES:
            words = [*PARALLEL_STYLES]
            hint = nearest(style, words) if isinstance(style, str) else f"the styles are {', '.join(words)}"
            raise UserError(f"parallel has {shown(style)} for the layer '{layer}'; {hint}")


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
    "give batch_weight=(batch) -> number": "num_items_in_batch num_items average_tokens_across_devices",
}


def refuse_unknown(cls: type, given: Iterable[str]) -> None:
    """Raises UserError for an argument that Job has not, with what it is called here."""
    known = [field.name for field in fields(cls)]
    for name in given:
        if name not in known:
            hint = next((hint for hint, names in HINTS.items() if name in names.split()), nearest(name, known))
            raise UserError(f"Job has no argument '{name}'; {hint}")
