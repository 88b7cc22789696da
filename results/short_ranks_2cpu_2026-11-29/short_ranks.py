"""Launches of two short ranks, forked from a process that has imported torch, each ending as Python ends.

    python short_ranks.py LAUNCHES keep|destroy     destroy: the ranks destroy their process group before they end

Prints how each rank has ended; exit code 1 where one has not ended with 0.
"""

import collections
import multiprocessing
import sys
import tempfile

import torch
import torch._dynamo  # which an optimizer imports
import torch.distributed as dist


def rank_main(rank: int, file: str, destroy: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    if destroy:
        dist.destroy_process_group()
    sys.exit(0)


def main() -> int:
    launches, destroy = int(sys.argv[1]), sys.argv[2] == "destroy"
    context, codes = multiprocessing.get_context("fork"), collections.Counter()
    for launch in range(launches):
        with tempfile.TemporaryDirectory() as folder:
            ranks = [context.Process(target=rank_main, args=(rank, f"{folder}/store", destroy)) for rank in range(2)]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join()
            codes.update(rank.exitcode for rank in ranks)
            print(launch, dict(codes), flush=True)
    print(sys.argv[2], dict(codes), flush=True)
    return int(set(codes) != {0})


if __name__ == "__main__":
    sys.exit(main())
