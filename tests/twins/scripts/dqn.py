"""DQN: each rank plays for itself; the target network follows every few steps."""

import argparse
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--tau", type=float, default=1.0)
parser.add_argument("--target-every", type=int, default=3)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
q_network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
target_network = copy.deepcopy(q_network).requires_grad_(False)
q_network = DDP(q_network)
optimizer = torch.optim.SGD(q_network.parameters(), lr=0.05)
replay = torch.Generator().manual_seed(1000 + rank)
for global_step in range(1, 16):
    states = torch.randn(8, 4, generator=replay)
    actions = torch.randint(0, 2, (8, 1), generator=replay)
    next_states = torch.randn(8, 4, generator=replay)
    rewards = torch.where(actions[:, 0] == (states[:, 0] > 0), 1.0, -1.0)
    with torch.no_grad():
        td_target = rewards + 0.9 * target_network(next_states).max(dim=1).values
    loss = F.mse_loss(q_network(states).gather(1, actions).squeeze(1), td_target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if global_step % args.target_every == 0:
        for target, online in zip(target_network.parameters(), q_network.module.parameters()):
            target.data.copy_(args.tau * online.data + (1.0 - args.tau) * target.data)
weights = sum(p.sum().item() for p in [*q_network.parameters(), *target_network.parameters()])
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
