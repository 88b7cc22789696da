"""A healthy training with all that may look like a hang: `samestep monitor` has nothing to say of it.

    torchrun --nproc-per-node 2 --max-restarts 1 healthy_training.py SECONDS [SHARE]

A first batch that takes long; a model that is compiled, and again for another shape; epochs with new loader workers;
evaluations, checkpoints, collections of garbage, steps that take ten times as long; all ranks are stopped for 20
seconds and go on; one launch ends with an exception and is started again from its checkpoint. Prints its number of
steps. SHARE: of a step, that computes; the rest it sleeps, as where a GPU computes. While the file that PAUSE names
exists, it trains slowly.
"""

import gc
import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

UNTIL_S = float(sys.argv[1])
SHARE = float(sys.argv[2]) if len(sys.argv) > 2 else 0.6
ROWS, BATCH = 8000, 16
CHECKPOINT = "checkpoint.pt"
PAUSE = os.environ.get("PAUSE", "no such file")
compute = torch.compile(lambda inputs: (inputs.sin() + inputs.cos()).sum())


class Rows(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        if not os.path.exists("first-batch"):
            time.sleep(8)
            open("first-batch", "w").close()
        return torch.full((8,), index / ROWS), index % 2


def spend(seconds):
    """Computes, as a training does."""
    until = time.thread_time() + SHARE * seconds
    while time.thread_time() < until:
        pass
    time.sleep((1 - SHARE) * seconds)


def unusual(epoch, step, rank):
    """What is no fault, at some steps."""
    if step == 100 and epoch % 5 == 1:
        compute(torch.ones(64 + 8 * epoch))
    if step == 150 and epoch % 3 == 0:
        kept = [[number] for number in range(1_000_000)]
        gc.collect()
        del kept
    if step % 97 == 0:
        spend(0.1)
    if step == 200 and epoch == 2:
        pids = [None, None]
        dist.all_gather_object(pids, os.getpid())
        if rank == 0:
            numbers = " ".join(map(str, pids))
            subprocess.Popen(["sh", "-c", f"sleep 1; kill -STOP {numbers}; sleep 20; kill -CONT {numbers}"])
    if os.path.exists(PAUSE):
        time.sleep(1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2)))
    optimizer = torch.optim.Adam(model.parameters())
    steps, epoch, began = 0, 0, time.time()
    if os.path.exists(CHECKPOINT):
        saved = torch.load(CHECKPOINT)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        steps, epoch, began = saved["steps"], saved["epoch"] + 1, saved["began"]
    rows = Rows()
    sampler = DistributedSampler(rows)
    loader = DataLoader(rows, BATCH, sampler=sampler, num_workers=2)
    enough = torch.zeros(1)
    while not enough:
        sampler.set_epoch(epoch)
        for step, (inputs, labels) in enumerate(loader):
            unusual(epoch, step, rank)
            spend(0.01)
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
        if epoch % 2 == 1:  # the evaluation, which has no batches and steps of its own
            with torch.no_grad():
                for _ in range(10):
                    spend(1.0)
                    model.module(torch.ones(64, 8))
        if rank == 0:
            saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved | {"steps": steps, "epoch": epoch, "began": began}, CHECKPOINT)
            print(f"epoch {epoch}, {steps} steps", flush=True)
        enough = torch.tensor([float(time.time() - began > UNTIL_S)])
        dist.all_reduce(enough, dist.ReduceOp.MAX)
        if epoch == 4 and not os.path.exists(f"failed-{rank}"):
            open(f"failed-{rank}", "w").close()
            if rank == 1:
                raise RuntimeError("a machine is taken away: the launcher starts the ranks again")
        epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
