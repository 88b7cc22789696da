"""A language model in the stages of a pipeline: torchrun --standalone --nproc-per-node 2 pipeline.py"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
VOCABULARY, LENGTH, WIDTH, LAYERS = 32, 8, 16, 4


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.mlp(self.norm(x)))


class Stage(nn.Module):
    def __init__(self, model, index, stages):
        super().__init__()
        per = LAYERS // stages
        self.embed = model["embed"] if index == 0 else None
        self.layers = nn.ModuleList(model["layers"][index * per : (index + 1) * per])
        self.head = model["head"] if index == stages - 1 else None

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


def whole_model(args):
    torch.manual_seed(1)
    layers = nn.ModuleList(Block(args.dropout) for _ in range(LAYERS))
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    model = nn.ModuleDict({"embed": nn.Embedding(VOCABULARY, WIDTH), "layers": layers, "head": head})
    nn.init.normal_(model["embed"].weight, std=0.1)
    if args.tied:
        model["head"].weight.data.copy_(model["embed"].weight.data)
    return model


def loss_fn(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def tied_weights(stages, last):
    copies = [stage.embed.weight for index, stage in stages.items() if index == 0]
    return copies + [stage.head.weight for index, stage in stages.items() if index == last]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--optimizer", default="SGD")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "stage"))
    data_mesh, stage_mesh = mesh["data"], mesh["stage"]
    replicas, rank, group = data_mesh.size(), stage_mesh.get_local_rank(), stage_mesh.get_group()
    kind = get_schedule_class(args.schedule)
    several = issubclass(kind, PipelineScheduleMulti)
    stages = 4 if several else 2
    mine = [rank]
    if several:
        mine = [rank, 3 - rank] if args.schedule in V_SHAPED else [rank, rank + 2]
    model = whole_model(args)
    parts = {index: Stage(model, index, stages) for index in mine}
    modules = dict(parts)
    if args.ddp:
        modules = {i: DistributedDataParallel(m, process_group=data_mesh.get_group()) for i, m in parts.items()}
    held = [PipelineStage(m, i, stages, torch.device("cpu"), group=group) for i, m in modules.items()]
    schedule = kind(held if several else held[0], args.micro, loss_fn=loss_fn)
    parameters = [p for part in parts.values() for p in part.parameters()]
    optimizer = getattr(torch.optim, args.optimizer)(parameters, lr=0.1)
    torch.manual_seed(100 + dist.get_rank())
    tokens = torch.randint(VOCABULARY, (96, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    sampler = DistributedSampler(TensorDataset(tokens), num_replicas=replicas, rank=data_mesh.get_local_rank(), seed=3)
    loader = DataLoader(TensorDataset(tokens), batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            optimizer.zero_grad()
            inputs, targets, losses = batch[:, :-1], batch[:, 1:], []
            given = (inputs,) if 0 in parts else ()
            wanted = {"target": targets, "losses": losses} if stages - 1 in parts else {}
            schedule.step(*given, **wanted)
            if args.tied:
                copies = tied_weights(parts, stages - 1)
                total = sum(copy.grad for copy in copies)
                if args.schedule not in V_SHAPED:
                    dist.all_reduce(total, group=group)
                for copy in copies:
                    copy.grad.copy_(total)
            if not args.ddp and replicas > 1:
                for p in parameters:
                    dist.all_reduce(p.grad, group=data_mesh.get_group())
                    p.grad /= replicas
            if args.clip:
                once = [p for i, m in parts.items() for p in m.parameters() if not args.tied or p is not tied_head(m)]
                square = sum((p.grad.square().sum() for p in once), torch.zeros(()))
                dist.all_reduce(square, group=group)
                factor = torch.clamp(args.clip / (square.sqrt() + 1e-6), max=1.0)
                for p in parameters:
                    p.grad.mul_(factor)
            optimizer.step()
        if losses and dist.get_rank() < 2:
            print(f"epoch {epoch}: {torch.stack(losses).mean().item():.6f}")
    dist.destroy_process_group()


def tied_head(part):
    return None if part.head is None else part.head.weight


if __name__ == "__main__":
    main()
