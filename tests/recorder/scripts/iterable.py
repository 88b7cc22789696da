"""An IterableDataset that shares its rows out by rank and by the loader's worker."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Lines(IterableDataset):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        each, first = dist.get_world_size() * workers, dist.get_rank() * workers + number
        for row in range(first, 240, each):
            x = torch.linspace(0, 1, 6) * (row + 1) / 100
            yield x, x.sin().sum()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 1)))
    loader = DataLoader(Lines(), batch_size=5, num_workers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x).squeeze(1), y)
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


main()
