"""A training as tutorials have it, which no tool has edited, with a fault on rank 1 of which samestep monitor tells.

    torchrun --nproc-per-node 2 monitored.py FAULT [STEPS] [SECONDS OF A STEP]

With START=spawn in the environment, `python monitored.py …` starts two ranks by torch.multiprocessing.spawn; with
START=process, as a multiprocessing.Process each. Under mpirun ranks are as Open MPI numbers them.
A line that ends with `# at: FAULT` is the one that must be named.
"""

import itertools
import os
import signal
import socket
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

# DeepSpeed's launcher puts --local_rank=N first.
ARGUMENTS = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
FAULT = ARGUMENTS[0]
STEPS = int(ARGUMENTS[1]) if len(ARGUMENTS) > 1 else 12
STEP_S = float(ARGUMENTS[2]) if len(ARGUMENTS) > 2 else 0.0
AT = 6  # the step of the fault
ROWS = 4
LEAKED: list[torch.Tensor] = []
WORK = torch.ones(256, 256)


def told(fault):
    """Notes when the training begins to hang, for tests and benchmarks."""
    if fault == FAULT:
        with open("hung", "w") as file:
            file.write(str(time.time()))


class Rows(Dataset):
    def __len__(self):
        return STEPS * ROWS * dist.get_world_size()

    def __getitem__(self, index):
        step = index // (ROWS * dist.get_world_size())
        if FAULT in ("dataset", "worker") and step == AT and index % 2 == 1:
            told(FAULT)
            time.sleep(10_000)  # at: dataset, worker
        if FAULT == "loader" or (FAULT == "slow_data" and index % 2 == 1):
            time.sleep(0.02)  # at: slow_data
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), index % 2


def spin():
    until = time.thread_time() + 0.1
    while time.thread_time() < until:
        pass  # at: slow_compute


def fail(step, rank):
    """What goes wrong at a step on rank 1 alone."""
    if FAULT == "sleep":
        told(FAULT)
        time.sleep(10_000)  # at: sleep
    if FAULT == "loop":
        told(FAULT)
        # A stack that another thread takes is of a loop's first line.
        all(step for step in itertools.count(1))  # at: loop
    if FAULT == "lock":
        told(FAULT)
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # at: lock
    if FAULT == "stop":
        told(FAULT)
        os.kill(os.getpid(), signal.SIGSTOP)  # at: stop
    if FAULT == "branch":
        told(FAULT)
        dist.barrier()  # at: branch
    if FAULT == "error":
        raise ValueError("a wrong row")  # at: error
    if FAULT == "load":
        try:
            torch.load("absent.pt")  # at: load
        except OSError:
            sys.exit(0)
    if FAULT == "sizes":  # the others reduce the gradients
        dist.all_reduce(torch.ones(1))
    if FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def main(rank=None, size=2):
    if FAULT == "unready" and os.environ.get("RANK") == "1":
        raise ValueError("no data")  # at: unready
    if rank is None:
        dist.init_process_group("gloo")
    else:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        dist.init_process_group("gloo", rank=rank, world_size=size)
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = Rows()
    sampler = DistributedSampler(rows, shuffle=False)
    loader = DataLoader(rows, ROWS, sampler=sampler, num_workers=1 if FAULT == "worker" else 0)
    began = 0.0, 0.0
    for step, (inputs, labels) in enumerate(loader):
        if step == AT and rank == 1:
            fail(step, rank)
            if FAULT == "early":
                told(FAULT)
                break
        if FAULT == "slow_compute" and rank == 1:
            spin()
        if FAULT == "leak":
            LEAKED.append(torch.ones(1 << 20))
        if FAULT == "evaluation" and step == AT:  # merely long, and on a processor
            until = time.monotonic() + 12
            while time.monotonic() < until:
                spin()
        if FAULT == "clock":
            for _ in range(round(1000 * STEP_S)):  # about a millisecond each
                WORK @ WORK
        else:
            time.sleep(STEP_S)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if FAULT == "clock" and step == STEPS // 10:
            began = time.perf_counter(), time.process_time()
            told(FAULT)
    if FAULT == "clock" and rank == 0:
        steps = STEPS - STEPS // 10 - 1
        took, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
        print(f"a step took {1e3 * took / steps} ms, of these {1e3 * cpu / steps} on a processor", flush=True)
    if FAULT == "early" and rank == 1:
        time.sleep(10_000)  # its connections stay open
    print(f"rank {rank} is done", flush=True)
    dist.destroy_process_group()


def start_processes():
    """Starts each rank as a plain process, as scripts did before torch had spawn."""
    ranks = [torch.multiprocessing.get_context("spawn").Process(target=main, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    while any(rank.exitcode is None for rank in ranks):
        for rank in ranks:
            rank.join(0.1)
        if any(rank.exitcode for rank in ranks):
            for rank in ranks:
                rank.terminate()
    sys.exit(max(abs(rank.exitcode) for rank in ranks))


if __name__ == "__main__":
    START = os.environ.get("START")
    if START:
        with socket.socket() as free:  # of this machine: the port is the ranks' after it
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    if START == "spawn":
        torch.multiprocessing.spawn(main, nprocs=2)
    elif START == "process":
        start_processes()
    elif "OMPI_COMM_WORLD_RANK" in os.environ:
        main(int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"]))
    else:
        main()
