"""A GAN: two wrapped models, two optimizers that step in turn, noise drawn beside the models."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--critic-steps", type=int, default=1)
parser.add_argument("--optimizer", default="Adam", choices=["Adam", "SGD"])
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
data = TensorDataset(torch.randn(64, 6) @ torch.randn(6, 6) + 1)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
netG = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6)))
netD = DDP(nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
kind = getattr(torch.optim, args.optimizer)
optimizerG, optimizerD = kind(netG.parameters(), lr=0.01), kind(netD.parameters(), lr=0.01)
torch.manual_seed(100 + rank)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for i, (real,) in enumerate(loader):
        noise = torch.randn(len(real), 4)
        fake = netG(noise)
        optimizerD.zero_grad()
        output = netD(torch.cat([real, fake.detach()]))
        labels = torch.cat([torch.ones(len(real), 1), torch.zeros(len(fake), 1)])
        lossD = F.binary_cross_entropy_with_logits(output, labels)
        lossD.backward()
        optimizerD.step()
        if i % args.critic_steps == 0:
            optimizerG.zero_grad()
            lossG = F.binary_cross_entropy_with_logits(netD(fake), torch.ones(len(fake), 1))
            lossG.backward()
            optimizerG.step()
weights = sum(p.sum().item() for p in [*netG.parameters(), *netD.parameters()])
print(f"rank {rank}: loss {lossD.item():.5f} {lossG.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
