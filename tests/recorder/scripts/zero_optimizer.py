"""DDP whose optimizer's state is shared out over the ranks: ZeroRedundancyOptimizer, a schedule, clipping."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(4)
    x = torch.randn(48, 6)
    data = TensorDataset(x, x.abs().sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=6, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 24), nn.SiLU(), nn.Linear(24, 1)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 6)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for rows, targets in loader:
            loss = nn.functional.smooth_l1_loss(model(rows), targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
    dist.destroy_process_group()


main()
