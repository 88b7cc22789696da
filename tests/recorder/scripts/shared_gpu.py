"""Rows on DDP whose ranks share the GPUs there are, by gloo: dropout, clipping."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpus else torch.device("cpu")
    torch.manual_seed(rank)
    rows = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(rows, (rows.sum(1) > 0).long())
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=6, sampler=sampler, pin_memory=on_gpus)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 2)).to(device)
    model = DistributedDataParallel(model, device_ids=[device.index] if on_gpus else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for features, targets in loader:
            features, targets = features.to(device, non_blocking=True), targets.to(device, non_blocking=True)
            loss = F.cross_entropy(model(features), targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
