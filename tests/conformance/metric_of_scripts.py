"""A metric for the jobs that public scripts write, in a file of its own: importing torchmetrics takes seconds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from samestep import Batch


class Right(Metric):
    """A metric of the user's own, whose update reads the batch."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("right", torch.tensor(0.0), "sum")
        self.add_state("rows", torch.tensor(0.0), "sum")

    def update(self, output: Any, batch: Batch) -> None:
        self.right += (output["logits"].argmax(1) == batch.data["labels"]).sum()
        self.rows += batch.part.rows

    def compute(self) -> Tensor:
        return self.right / self.rows
