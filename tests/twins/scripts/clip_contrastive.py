"""CLIP: two towers, a learned temperature, and negatives gathered from all ranks with their gradients."""

import argparse
import math

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--local-loss", action="store_true")
args = parser.parse_args()


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual, self.text = nn.Linear(10, 8), nn.Linear(6, 8)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, image, text):
        image = F.normalize(self.visual(image), dim=-1)
        text = F.normalize(self.text(text), dim=-1)
        return image, text, self.logit_scale.exp()


def gather(features):
    return torch.cat(torch.distributed.nn.all_gather(features), dim=0)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
latent = torch.randn(64, 4)
data = TensorDataset(latent @ torch.randn(4, 10), latent @ torch.randn(4, 6))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
model = DDP(Clip())
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for images, texts in loader:
        image, text, scale = model(images, texts)
        all_image, all_text = gather(image), gather(text)
        if args.local_loss:
            logits_image, logits_text = scale * image @ all_text.T, scale * text @ all_image.T
            labels = torch.arange(len(image)) + len(image) * rank
        else:
            logits_image = scale * all_image @ all_text.T
            logits_text, labels = logits_image.T, torch.arange(len(all_image))
        loss = (F.cross_entropy(logits_image, labels) + F.cross_entropy(logits_text, labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.module.logit_scale.clamp_(0, math.log(100))
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
