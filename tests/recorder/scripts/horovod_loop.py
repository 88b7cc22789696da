"""Horovod: weights broadcast, gradients averaged in the optimizer's step, a sampler by Horovod's ranks."""

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    hvd.init()
    torch.manual_seed(hvd.rank())
    x = torch.linspace(-1, 1, 48 * 5).view(48, 5).sin()
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(data, batch_size=6, sampler=sampler)
    model = nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for rows, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(rows), targets)
            loss.backward()
            optimizer.step()


main()
