"""A model that torch.compile has compiled, inside of DDP."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(8)
    x = torch.randn(48, 6)
    data = TensorDataset(x, x.cos().sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=6, sampler=sampler)
    model = torch.compile(nn.Sequential(nn.Linear(6, 20), nn.GELU(), nn.Linear(20, 1)), backend="aot_eager")
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for rows, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(rows), targets)
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


main()
