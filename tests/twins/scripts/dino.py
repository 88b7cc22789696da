"""DINO: several crops, drop path, a teacher by moving average, a centre of all ranks, schedules by hand."""

import argparse
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--clip_grad", type=float, default=0.3)
parser.add_argument("--drop_path", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=4)
args = parser.parse_args()


class Crops(Dataset):
    def __init__(self):
        self.images = torch.randn(48, 8, generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return [self.images[index] + 0.2 * torch.randn(8, generator=generator) for _ in range(4)]


class Backbone(nn.Module):
    def __init__(self, drop_path):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 12)
        self.drop_path = drop_path

    def features(self, x):
        x = F.gelu(self.first(x))
        branch = F.gelu(self.second(x))
        if self.training and self.drop_path > 0:
            keep = 1 - self.drop_path
            branch = branch / keep * (keep + torch.rand(len(x), 1)).floor()
        return x + branch

    def forward(self, crops):
        return self.head(torch.cat([self.features(crop) for crop in crops]))


class DINOLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 12))

    def forward(self, student_output, teacher_output):
        student = (student_output / 0.1).chunk(4)
        teacher = F.softmax((teacher_output - self.center) / 0.04, dim=-1).detach().chunk(2)
        total, terms = 0, 0
        for i, q in enumerate(teacher):
            for j, p in enumerate(student):
                if i != j:
                    total = total + torch.sum(-q * F.log_softmax(p, dim=-1), dim=-1).mean()
                    terms += 1
        self.update_center(teacher_output)
        return total / terms

    @torch.no_grad()
    def update_center(self, teacher_output):
        batch_center = torch.sum(teacher_output, dim=0, keepdim=True)
        dist.all_reduce(batch_center)
        batch_center = batch_center / (len(teacher_output) * dist.get_world_size())
        self.center = self.center * 0.9 + batch_center * 0.1


def clip_gradients(model, clip):
    for p in model.parameters():
        if p.grad is not None:
            coefficient = clip / (p.grad.norm(2) + 1e-6)
            if coefficient < 1:
                p.grad.mul_(coefficient)


def cosine(start, end, total):
    return [end + 0.5 * (start - end) * (1 + math.cos(math.pi * i / total)) for i in range(total)]


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
dataset = Crops()
sampler = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, sampler=sampler, batch_size=6, drop_last=True)
student, teacher = Backbone(args.drop_path), Backbone(0.0)
teacher.load_state_dict(student.state_dict())
student = DDP(student)
for p in teacher.parameters():
    p.requires_grad = False
dino_loss = DINOLoss()
optimizer = torch.optim.AdamW(student.parameters())
total = args.epochs * len(loader)
rates, decays, momenta = cosine(2e-3, 1e-5, total), cosine(0.04, 0.4, total), cosine(0.99, 1, total)
torch.manual_seed(10 + rank)
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for step, crops in enumerate(loader):
        it = len(loader) * epoch + step
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = rates[it], decays[it]
        teacher_output = teacher(crops[:2])
        loss = dino_loss(student(crops), teacher_output)
        optimizer.zero_grad()
        loss.backward()
        if args.clip_grad:
            clip_gradients(student, args.clip_grad)
        optimizer.step()
        with torch.no_grad():
            for q, k in zip(student.module.parameters(), teacher.parameters()):
                k.data.mul_(momenta[it]).add_((1 - momenta[it]) * q.detach().data)
total = sum(p.sum().item() for p in [*student.parameters(), *teacher.parameters()])
print(f"rank {rank}: loss {loss.item():.5f} weights {total:.6f} centre {dino_loss.center.sum():.5f}", flush=True)
dist.destroy_process_group()
