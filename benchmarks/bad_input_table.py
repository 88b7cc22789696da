"""What a case of bad_inputs.py is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

WORKS, FAILED, REFUSED = 0, 1, 2  # exit codes

QUICK = """\
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from samestep import Job, Recipe

def model():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3)

def job(lr: float = 0.1):
    rows = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 3)
    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": lr}),
        train=rows,
        evaluation=rows,
        metrics={"accuracy": lambda output, batch: output.argmax(1) == batch.targets},
        global_batch=8,
        epochs=2,
    )
"""


@dataclass(frozen=True)
class Case:
    """A line for bash, in which SAMESTEP is the command, and what must come of it.

    codes: the exit codes that are right. says: a word that must be printed. files: those of the folder. folder: its
    name. changes: whether a refused command may leave something in the folder. judge_lines: whether a refusal must be
    the only line on stderr. forked: whether its workers are forked from a server, which has another environment.
    """

    kind: str
    name: str
    shell: str
    codes: tuple[int, ...] = (REFUSED,)
    says: str = ""
    files: Mapping[str, str | bytes] = field(default_factory=lambda: {"quick.py": QUICK})
    env: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    folder: str = ""
    changes: bool = False
    judge_lines: bool = True
    forked: bool = True
