"""Checks the functions and the optimizers of a Job and of its phases, and says in words what a wrong value is."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from samestep.errors import UserError


def is_of_torch(value: Any, name: str) -> bool:
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
    built = is_of_torch(given, "Optimizer")
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


def check_functions(model: Any, criterion: Any) -> None:
    """Raises UserError with the line to write where a Job has a module, or one of torch's losses, for a function."""
    if is_of_torch(model, "Module") or not callable(model):
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
