"""A diffusion model: times and noise drawn beside the model, a moving average of the weights for sampling."""

import argparse
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--ema-decay", type=float, default=0.95)
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 32), nn.SiLU(), nn.Linear(32, 6))

    def forward(self, x, t):
        return self.net(torch.cat([x, t[:, None] / 100], dim=1))


@torch.no_grad()
def update_ema(ema_model, model, decay):
    for ema, parameter in zip(ema_model.parameters(), model.parameters()):
        ema.mul_(decay).add_(parameter.data, alpha=1 - decay)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 6) * 0.5 + 1)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
model = Denoiser()
ema = copy.deepcopy(model).requires_grad_(False)
model = DDP(model)
alphas = torch.linspace(0.999, 0.01, 100)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(20 + rank)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (x,) in enumerate(loader):
        t = torch.randint(0, 100, (len(x),))
        noise = torch.randn_like(x)
        alpha = alphas[t][:, None]
        loss = F.mse_loss(model(alpha.sqrt() * x + (1 - alpha).sqrt() * noise, t.float()), noise)
        (loss / args.accumulate).backward()
        if (i + 1) % args.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            update_ema(ema, model.module, args.ema_decay)
weights = sum(p.sum().item() for p in model.parameters())
average = sum(p.sum().item() for p in ema.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f} average {average:.6f}", flush=True)
dist.destroy_process_group()
