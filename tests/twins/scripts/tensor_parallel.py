"""A small language model by tensor parallelism: torchrun --standalone --nproc-per-node 2 tensor_parallel.py"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, LENGTH, WIDTH, HEADS = 64, 8, 16, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp, self.drop = Attention(), MLP(), nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Model(nn.Module):
    def __init__(self, dropout, tied):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallelize(model, mesh, args):
    sequence, loss = args.sequence_parallel, args.loss_parallel
    cut = dict(input_layouts=Replicate(), output_layouts=Shard(1)) if sequence else dict(input_layouts=Replicate())
    plan = {
        "tokens": RowwiseParallel(**cut),
        "head": ColwiseParallel(
            input_layouts=Shard(1) if sequence else Replicate(),
            output_layouts=Shard(-1) if loss else Replicate(),
            use_local_output=not loss,
        ),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        row = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
        layers = {f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")}
        layers |= {"attention.out": row, "mlp.up": ColwiseParallel(), "mlp.down": row}
        if sequence:
            gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            layers |= {"norm1": SequenceParallel(), "norm2": SequenceParallel(), "attention": gather, "mlp": gather}
        parallelize_module(block, mesh, layers)


def clip(model, limit):
    """Clips by the whole norm, which torch's own function refuses of plain parameters beside divided ones."""
    norms = [torch.linalg.vector_norm(p.grad) for p in model.parameters()]
    total = torch.stack([norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]).norm()
    for p in model.parameters():
        p.grad.mul_(min(1.0, limit / float(total)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--loss-parallel", action="store_true")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--optimizer", default="SGD")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(1)
    model = Model(args.dropout, args.tied)
    parallelize(model, mesh, args)
    if args.tied:
        model.head.weight = model.tokens.weight  # which are two parameters now
    lr = 0.01
    optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=lr)
    ids = torch.randint(VOCABULARY, (96, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    data, order = TensorDataset(ids), torch.Generator().manual_seed(2)
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=order)
    for epoch in range(2):
        for number, (batch,) in enumerate(loader):
            with loss_parallel() if args.loss_parallel else nullcontext():
                logits = model(batch[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
                loss = loss / args.accumulate
                loss.backward()
            if (number + 1) % args.accumulate == 0:
                if args.clip and args.sequence_parallel:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
                elif args.clip:
                    clip(model, args.clip)
                optimizer.step()
                optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
