"""What does keying the global random generators by sample cost, per row?

    python benchmarks/keyed_random.py [--rounds N] [--out results/NAME]

Reads batches of 64 rows of 3 KiB from datasets that draw nothing, or one number from torch's, Python's or numpy's
generator, or one from each. `plain` reads them as torch's DataLoader without workers does: row by row, then
default_collate. `keyed` reads them as samestep does. The two take turns. Prints microseconds per row, the
median over the rounds, and the difference. --out writes table.txt and raw.json (every round, the machine).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from samestep import Job, Recipe
from samestep.data.loader import Rows
from samestep.data.schedule import schedule_of
from samestep.rank import hardware
from samestep.records.files import as_json

ROWS, BATCH = 64 * 64, 64
DRAWS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "torch": lambda: torch.rand(()),
    "random": random.random,
    "numpy": lambda: np.random.rand(),
    "all three": lambda: (torch.rand(()), random.random(), np.random.rand()),
}


class Drawing(Dataset[Any]):
    """Rows of 3 KiB; reading one draws from the generators that `of` names."""

    def __init__(self, of: str) -> None:
        self.data, self.draw = torch.zeros(ROWS, 768), DRAWS[of]

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        self.draw()
        return self.data[index]


def job(of: str) -> Job:
    return Job(
        model=lambda: nn.Linear(768, 1),
        criterion=lambda output, batch: output.mean(),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.1}),
        train=Drawing(of),
        global_batch=BATCH,
    )


def measured(of: str, rounds: int) -> dict[str, list[float]]:
    """Microseconds per row of each round, plain and keyed."""
    made = job(of)
    rows, parts = Rows(made), list(schedule_of(made, 1).micro_batches_of(0, ROWS // BATCH))
    arms: dict[str, Callable[[Any], Any]] = {
        "plain": lambda part: default_collate([made.train[i] for i in part.indices.tolist()]),
        "keyed": lambda part: rows[part],
    }
    found: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name in list(arms)[:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            for part in parts:
                arms[name](part)
            if number:  # the first round warms up
                found[name].append((time.perf_counter() - start) / ROWS * 1e6)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    raw = {of: measured(of, options.rounds) for of in DRAWS}
    lines = ["drawn from   plain   keyed   more   (µs per row)"]
    for of, arms in raw.items():
        plain, keyed = (statistics.median(arms[name]) for name in ("plain", "keyed"))
        lines.append(f"{of:11} {plain:6.1f} {keyed:7.1f} {keyed - plain:6.1f}")
    table = "\n".join(lines)
    print(table)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "table.txt").write_text(f"{table}\n")
        record = {"machine": as_json(hardware.facts("cpu")), "us_per_row": raw}
        (options.out / "raw.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
