"""A public script, how it is run on small data, and the faults that are planted in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from planting import Edit


@dataclass(frozen=True)
class Plant:
    """A fault. edits: what it changes. question: whose answer is 'differs' first; cause: its id."""

    name: str
    edits: tuple[Edit, ...]
    question: str
    cause: str


def words(text: str) -> tuple[str, ...]:
    """Returns the words of a command line."""
    return tuple(text.split())


def plant(name: str, old: str, new: str, question: str, cause: str, file: str = "") -> Plant:
    return Plant(name, (Edit(old, new, file),), question, cause)


# What the usual faults are found in, and their causes.
USUAL = {
    "not wrapped": ("initial weights", "ranks_begin_with_different_weights"),
    "not wrapped, one seed": ("gradient", "ranks_never_reduce_gradients"),
    "forward through .module": ("gradient", "ranks_never_reduce_gradients"),
    "no sampler": ("rows", "rows_not_shared_out"),
    "set_epoch left out": ("order", "set_epoch_never_called"),
    "rate by rank": ("rate", "rates_differ_between_ranks"),
    "rate times the ranks": ("replayed rate", "rate_depends_on_ranks"),
    "loss times the ranks": ("loss weight", "loss_multiplied_by_ranks"),
    "loss divided by the ranks": ("loss weight", "loss_divided_by_ranks"),
    "accumulation not divided": ("loss weight", "loss_not_divided_by_accumulation"),
    "gradients never cleared": ("gradient", "gradients_never_cleared"),
    "optimizer of a copy": ("updates", "optimizer_of_a_copy"),
}


def usual(name: str, old: str, new: str, file: str = "") -> Plant:
    return plant(name, old, new, *USUAL[name], file)


@dataclass(frozen=True)
class Case:
    """A script of a public repository.

    repo: OWNER/NAME on GitHub, at a commit. folder: what is taken of it, or parts: several paths; the script runs in
    `cwd` of that, as `module` where that has a name. on_gpus: whether it names GPUs, for which CPUs
    stand; before: modules of standins/ that are imported before the script;
    packages: stand-ins for packages that it imports. prepare: makes its data. sizes: edits of numbers alone, without
    which it would not train in seconds on CPUs, and for which it has no option: they are made in each row. answer: what
    is right to say of the script as it is; why: words of the first divergence's cause, or of an unknown. edits: what
    else the script needs for a training that can be judged; the faults are planted in that, and it is checked as well.
    """

    name: str
    repo: str
    commit: str
    script: str
    arguments: tuple[str, ...] = ()
    cwd: str = ""
    folder: str = ""
    parts: tuple[str, ...] = ()
    module: str = ""
    on_gpus: bool = False
    before: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    prepare: Callable[[Path], object] | None = None
    env: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    sizes: tuple[Edit, ...] = ()
    answer: str = "right"
    why: str = ""
    edits: tuple[Edit, ...] = ()
    note: str = ""
    plants: tuple[Plant, ...] = ()
    ranks: int = 2
