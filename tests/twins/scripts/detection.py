"""Detection as DETR does it: lists of boxes, a dict of losses with weights, divided by the boxes of all ranks."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--optimizer", default="SGD", choices=["SGD", "AdamW"])
args = parser.parse_args()


class Boxes(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image, count = torch.randn(8, generator=generator), 1 + index % 4
        return image, {"boxes": image[:4].expand(count, 4).clone(), "labels": torch.arange(count)}


def collate(batch):
    images, targets = zip(*batch)
    return torch.stack(images), list(targets)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.box, self.label = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, images):
        hidden = torch.relu(self.body(images))
        return self.box(hidden).view(-1, 4, 4), self.label(hidden).view(-1, 4, 4)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
dataset = Boxes()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=6, sampler=sampler, collate_fn=collate)
model = DDP(Detector())
optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=0.02)
weight_dict = {"bbox": 5.0, "labels": 1.0}
for epoch in range(3):
    sampler.set_epoch(epoch)
    for images, targets in loader:
        boxes, logits = model(images)
        num_boxes = torch.tensor(float(sum(len(target["labels"]) for target in targets)))
        dist.all_reduce(num_boxes)
        num_boxes = torch.clamp(num_boxes / world, min=1).item()
        matched = torch.cat([boxes[i, : len(t["labels"])] for i, t in enumerate(targets)])
        scores = torch.cat([logits[i, : len(t["labels"])] for i, t in enumerate(targets)])
        loss_dict = {
            "bbox": F.l1_loss(matched, torch.cat([t["boxes"] for t in targets]), reduction="sum") / num_boxes,
            "labels": F.cross_entropy(scores, torch.cat([t["labels"] for t in targets]), reduction="sum") / num_boxes,
        }
        losses = sum(loss_dict[k] * weight_dict[k] for k in loss_dict)
        optimizer.zero_grad()
        losses.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {losses.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
