"""A token model on texts of unequal length: the labels of padding are -100."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Texts(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = (torch.arange(12) * (index + 3)) % 16
        labels = tokens.roll(-1)
        labels[2 + index % 10 :] = -100
        return tokens, labels


dist.init_process_group("gloo")
torch.manual_seed(0)
data = Texts()
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=3, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(6):
    sampler.set_epoch(epoch)
    for x, y in loader:
        tokens = (y != -100).sum()
        dist.all_reduce(tokens)
        total = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        loss = total / tokens * dist.get_world_size()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
