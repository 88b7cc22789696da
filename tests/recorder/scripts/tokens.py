"""Sequences of unequal length on DDP: the loss is the mean over the tokens of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    x = torch.randint(0, 20, (48, 9))
    mask = (torch.arange(9) < torch.randint(2, 10, (48, 1))).float()
    data = TensorDataset(x, mask)
    sampler = DistributedSampler(data, seed=4)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(20, 16), nn.Tanh(), nn.Linear(16, 20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for tokens_in, kept in loader:
            logits = model(tokens_in)
            losses = F.cross_entropy(logits.flatten(0, 1), (tokens_in * 3 % 20).flatten(), reduction="none")
            tokens = kept.sum()
            dist.all_reduce(tokens)
            tokens = tokens / dist.get_world_size()
            loss = (losses * kept.flatten()).sum() / tokens
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


main()
