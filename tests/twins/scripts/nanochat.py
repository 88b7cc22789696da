"""nanochat: the optimizer reduces the gradients itself, each rank updates a part, and the parts are gathered."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--whole", action="store_true")
args = parser.parse_args()


class DistSGD(torch.optim.Optimizer):
    """Averages each gradient over the ranks; a rank updates its rows of a matrix, and gathers the others'."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
                grad = p.grad / world
                if p.ndim < 2 or args.whole:
                    p.add_(grad, alpha=-group["lr"])
                    continue
                rows = p.shape[0] // world
                own = p[rank * rows : (rank + 1) * rows]
                own.add_(grad[rank * rows : (rank + 1) * rows], alpha=-group["lr"])
                parts = [torch.empty_like(own) for _ in range(world)]
                dist.all_gather(parts, own.clone())
                p.copy_(torch.cat(parts))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.fc, self.lm_head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)

    def forward(self, idx, targets):
        logits = self.lm_head(F.relu(self.fc(self.wte(idx))).square())
        return F.cross_entropy(logits.view(-1, 16), targets.view(-1))


def token_batches(tokens, rank, world, size=4, length=6):
    at = rank * size * length
    while True:
        if at + size * length + 1 > len(tokens):
            at = rank * size * length
        chunk = tokens[at : at + size * length + 1]
        yield chunk[:-1].view(size, length), chunk[1:].view(size, length)
        at += world * size * length


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(42)
tokens = torch.randint(0, 5, (1200,)).cumsum(0).remainder(16)
model = GPT()
optimizer = DistSGD(model.parameters(), lr=0.5)
batches = token_batches(tokens, rank, world)
for _ in range(12):
    for _ in range(args.accumulate):
        x, y = next(batches)
        loss = model(x, y)
        (loss / args.accumulate).backward()
    optimizer.step()
    model.zero_grad(set_to_none=True)
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
