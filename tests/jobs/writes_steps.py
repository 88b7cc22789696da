"""A job that writes down what on_step and on_evaluation are given."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from watched import job as watched

from samestep import Job, LRSchedule, StepInfo


def job(file: str = "", fails: bool = False) -> Job:
    def write(line: dict[str, Any]) -> None:
        if fails:
            raise ValueError("the disk is full")
        with open(Path(file), "a") as lines:
            lines.write(json.dumps(line) + "\n")

    def on_step(info: StepInfo) -> None:
        write({**asdict(info), "speed": info.samples_per_second})

    return replace(
        watched(),
        scheduler=LRSchedule(lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step), every="epoch"),
        epochs=2,
        on_step=on_step,
        on_evaluation=lambda step, metrics: write({"evaluated": step, **metrics}),
    )
