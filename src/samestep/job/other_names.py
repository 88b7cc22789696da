"""What a Job's fields are called elsewhere: in Lightning, Hugging Face's Trainer, Keras and torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from samestep.errors import UserError, nearest

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
