"""A training as it should be, of which each rank does beside it what scripts do: forks, starts, closes, waits, runs.

torchrun --nproc-per-node 2 beside.py
"""

import multiprocessing
import os
import subprocess
import sys
import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(model, optimizer, loader):
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def forked(end):
    """Forks a child that ends by end(); returns its exit code."""
    child = os.fork()
    if child == 0:
        end(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main():
    rows = TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
    model = torch.nn.Linear(4, 2)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(rows, 16))
    # As Python ends: its objects are destroyed. With a group of torch's such a child hangs by itself.
    ended = [forked(sys.exit)]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    sampler = DistributedSampler(rows)
    loader = DataLoader(rows, 4, sampler=sampler)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, loader)
    ended.append(forked(os._exit))
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join()
    ended.append(process.exitcode)
    ended.append(subprocess.run([sys.executable, "-c", "pass"]).returncode)
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join()
    sampler.set_epoch(1)
    train(model, optimizer, loader)
    dist.barrier()
    print(f"rank {rank} has trained; what it started ended with {ended}", flush=True)


main()
