"""Mean teacher: a teacher by moving average teaches unlabelled rows; its weight ramps up with the steps."""

import argparse
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--decay", type=float, default=0.9)
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()


@torch.no_grad()
def update_teacher(teacher, student, decay):
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.mul_(decay).add_(s, alpha=1 - decay)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(96, 6)
data = TensorDataset(x[:48], (x[:48].sum(1) > 0).long(), x[48:])
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=6, sampler=sampler, drop_last=True)
student = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
teacher = copy.deepcopy(student).requires_grad_(False)
student = DDP(student)
optimizer = torch.optim.SGD(student.parameters(), lr=0.2)
global_step = 0
for epoch in range(4):
    sampler.set_epoch(epoch)
    for i, (labelled, targets, unlabelled) in enumerate(loader):
        output = student(torch.cat([labelled, unlabelled]))
        known, guessed = output.split([len(labelled), len(unlabelled)])
        with torch.no_grad():
            taught = teacher(unlabelled)
        weight = min(1.0, global_step / 8)
        loss = F.cross_entropy(known, targets) + weight * F.mse_loss(guessed.softmax(1), taught.softmax(1))
        (loss / args.accumulate).backward()
        if (i + 1) % args.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            global_step += 1
            update_teacher(teacher, student.module, args.decay)
weights = sum(p.sum().item() for p in [*student.parameters(), *teacher.parameters()])
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
