"""Times the steps of a tiny job on one rank: python step_time.py plain|guards"""

import itertools
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from samestep.job import Job, Recipe
from samestep.rank.guards import Guards
from samestep.training import Run
from samestep.world import World

torch.set_num_threads(1)
rows = torch.randn(256, 4)
job = Job(
    model=lambda: nn.Linear(4, 4),
    forward=lambda model, batch: model(batch.inputs),
    criterion=lambda output, batch: F.mse_loss(output, batch.targets),
    optimizer=Recipe(torch.optim.SGD, {"lr": 0.01}),
    train=TensorDataset(rows, rows),
    global_batch=32,
    epochs=1000,
)
is_guarded = sys.argv[1] == "guards"
run = Run(
    job,
    World(),
    2000,
    guards=Guards() if is_guarded else None,
    progress=(lambda *_: None) if is_guarded else None,
)
model = job.model()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
run.register(model, optimizer)
ended_s = []
for batch in run.batches():
    loss = run.loss(model, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.step(loss)
    ended_s.append(time.thread_time())
steps_us = sorted(1e6 * (after - before) for before, after in itertools.pairwise(ended_s))
print(f"{steps_us[len(steps_us) // 10]:.1f} {statistics.median(steps_us):.1f}")
