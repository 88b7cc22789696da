"""A language model that torch's tracer cuts into the stages of a pipeline:
torchrun --standalone --nproc-per-node 2 traced_pipeline.py"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCABULARY, LENGTH, WIDTH, LAYERS, ROWS = 32, 8, 16, 4, 8


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.mlp(self.norm(x)))


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.skip = args.skip
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(args.dropout) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)
        if args.tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        first = x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x + first if self.skip else x)


def loss_fn(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--skip", action="store_true")
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--dropout", type=float, default=0.0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "stage"))
    replicas, rank, group = mesh["data"].size(), mesh["stage"].get_local_rank(), mesh["stage"].get_group()
    kind = get_schedule_class(args.schedule)
    several = issubclass(kind, PipelineScheduleMulti)
    mine = [rank, rank + 2] if several else [rank]
    torch.manual_seed(1)
    model = Model(args)
    example = torch.zeros(ROWS // args.micro, LENGTH, dtype=torch.long)
    cuts = range(1, LAYERS) if several else [LAYERS // 2]
    pipe = pipeline(model, (example,), split_spec={f"layers.{cut}": SplitPoint.BEGINNING for cut in cuts})
    stages = [pipe.build_stage(index, torch.device("cpu"), group=group) for index in mine]
    schedule = kind(stages if several else stages[0], args.micro, loss_fn=loss_fn)
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    torch.manual_seed(100 + dist.get_rank())
    tokens = TensorDataset(torch.randint(VOCABULARY, (96, LENGTH + 1), generator=torch.Generator().manual_seed(0)))
    sampler = DistributedSampler(tokens, num_replicas=replicas, rank=mesh["data"].get_local_rank(), seed=3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (batch,) in DataLoader(tokens, batch_size=ROWS, sampler=sampler):
            optimizer.zero_grad()
            losses = []
            given = (batch[:, :-1],) if rank == 0 else ()
            wanted = {"target": batch[:, 1:], "losses": losses} if rank == 1 else {}
            schedule.step(*given, **wanted)
            trained = [p for p in parameters if p.grad is not None]
            if args.tied:  # each stage has a copy, as the tracer makes them
                name = "embed.weight" if rank == 0 else "head.weight"
                copy = dict(stages[-rank].submod.named_parameters())[name]
                dist.all_reduce(copy.grad, group=group)
            if replicas > 1:
                for p in trained:
                    dist.all_reduce(p.grad, group=mesh["data"].get_group())
                    p.grad /= replicas
            if args.clip:
                square = sum(p.grad.square().sum() for p in trained)
                dist.all_reduce(square, group=group)
                for p in trained:
                    p.grad.mul_(torch.clamp(args.clip / (square.sqrt() + 1e-6), max=1.0))
            optimizer.step()
        if rank == 1 and dist.get_rank() < 2:
            print(f"epoch {epoch}: {torch.stack(losses).mean().item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
