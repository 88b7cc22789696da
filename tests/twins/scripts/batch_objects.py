"""Batches that are objects of the script's own classes, as a detection model's: padded images with their masks."""

import argparse
from collections import namedtuple
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--kind", choices=("object", "dataclass", "namedtuple"), default="object")
args = parser.parse_args()


class MaskedImages:
    def __init__(self, tensors, mask):
        self.tensors, self.mask = tensors, mask

    def to(self, device):
        return MaskedImages(self.tensors.to(device), self.mask.to(device))


class Batch:
    def __init__(self, images, targets, size):
        self.images, self.targets, self.size = images, targets, size


@dataclass(frozen=True)
class DataBatch:
    images: MaskedImages
    targets: torch.Tensor
    size: int


NamedBatch = namedtuple("NamedBatch", "images targets size")
KINDS = {"object": Batch, "dataclass": DataBatch, "namedtuple": NamedBatch}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, images):
        weights = images.mask / images.mask.sum(1, keepdim=True)
        return (self.layers(images.tensors).squeeze(-1) * weights).sum(1)


def collate(rows):
    images, targets = torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])
    mask = images[:, :, 0] > -1.0
    mask[:, 0] = True
    return KINDS[args.kind](MaskedImages(images, mask), targets, len(rows))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
images = torch.randn(96, 5, 6)
data = TensorDataset(images, images.mean((1, 2)))
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, batch_size=8, sampler=sampler, collate_fn=collate)
model = DDP(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        loss = (model(batch.images.to("cpu")) - batch.targets).square().sum() / batch.size
        loss.backward()
        optimizer.step()
print(f"rank {rank}: {sum(p.square().sum() for p in model.parameters()).item():.6f}", flush=True)
dist.destroy_process_group()
