"""The numbers that an optimizer or a schedule was made with, by which two recordings are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.job.foreign import attribute_of, attributes_of, is_a
from samestep.recorder.patches import length_of
from samestep.records.script import GroupSettings, ScheduleRecord

# How a step is computed, what a schedule keeps in a group, and what counts on with each step.
NO_SETTINGS = {"params", "foreach", "fused", "capturable", "differentiable", "initial_lr", "step", "k"}
NO_SETTINGS |= {"max_lr", "min_lr", "base_momentum", "max_momentum", "lr_max", "weight_sum", "train_mode"}
# base_lrs: one for each group, whose rates are recorded.
COUNTERS = ("base_lrs", "last_epoch", "verbose", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i")


def settings_of(optimizer: Optimizer, held_by: Callable[[Mapping[str, Any]], list[str]]) -> list[GroupSettings]:
    """Returns the settings of each group. held_by: returns the names of a group's parameters."""
    return [
        GroupSettings(held_by(group), {name: number(v) for name, v in group.items() if _is_setting(name, v)})
        for group in optimizer.param_groups
    ]


def schedule_record(place: int, scheduler: LRScheduler) -> ScheduleRecord:
    """Returns the record of a schedule. place: its number."""
    values = {
        name: number(value)
        for name, value in attributes_of(scheduler).items()
        if (not name.startswith("_") or name == "_milestones") and name not in COUNTERS and _is_number(value)
    }
    for function in attribute_of(scheduler, "lr_lambdas", ())[:1]:  # the form of transformers' schedules
        keywords = attribute_of(function, "keywords", {})
        values |= {name: number(value) for name, value in keywords.items() if _is_number(value)}
    return ScheduleRecord(place, length_of(scheduler), type(scheduler).__name__, values)


def number(value: Any) -> Any:
    """Returns a number, or several, as JSON has them."""
    if is_a(value, Tensor):
        return value.item()
    if is_a(value, Counter):
        return [float(count) for count in sorted(value.elements())]
    return [number(part) for part in value] if is_a(value, list | tuple) else value


def _is_setting(name: str, value: Any) -> bool:
    return name not in NO_SETTINGS and (value is None or _is_number(value))


def _is_number(value: Any) -> bool:
    if is_a(value, Tensor):
        return value.numel() == 1
    if is_a(value, Counter):
        return all(is_a(part, int | float) for part in value)
    if is_a(value, list | tuple):
        return len(value) > 0 and all(map(_is_number, value))
    return is_a(value, int | float)
