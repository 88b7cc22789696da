"""One small job, and how a test writes it in other ways."""

from __future__ import annotations

import re
from pathlib import Path

from planting import Edit, with_patches

JOB = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Recipe

SAMPLES = torch.linspace(-1, 1, 120).view(20, 6), torch.arange(20) % 2


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 2)


def criterion(output, batch):
    return F.cross_entropy(output, batch.targets)


def job() -> Job:
    return Job(
        model=model,
        criterion=criterion,
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.5}),
        train=TensorDataset(*SAMPLES),
        global_batch=8,
    )
"""
IMPORT = "import torch\n"
BEGIN = "\nSAMPLES ="
SEED = "torch.manual_seed(0)"
LOSS = "return F.cross_entropy(output, batch.targets)"
DATA = "train=TensorDataset(*SAMPLES),"
ROWS = "global_batch=8"
END = ""

Changes = list[tuple[str, str]]  # what stands in JOB, and what is to stand there


def written(folder: Path, changes: Changes) -> str:
    """Writes the job, changed, and returns its target: its function `asked` where it has one."""
    text = with_patches(JOB, *(Edit(*change) for change in changes if change[0] != END))
    text += "".join(new for old, new in changes if old == END)
    path = folder / f"of_{folder.name}.py"
    path.write_text(text, encoding="utf-8")
    return f"{path}:asked" if re.search(r"^(def )?asked\b", text, re.MULTILINE) else str(path)
