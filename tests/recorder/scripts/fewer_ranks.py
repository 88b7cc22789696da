"""A step of four micro-batches over all ranks: each accumulates its part of them, as nanoGPT does. No DataLoader."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 14), nn.GELU(), nn.Linear(14, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.net(x)
        return out, nn.functional.mse_loss(out, y)


def main() -> None:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    micro = 4 // world
    torch.manual_seed(1 + dist.get_rank())
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(50):
        for number in range(micro):
            x = torch.randn(5, 7)
            model.require_backward_grad_sync = number == micro - 1
            _, loss = model(x, x.prod(1, keepdim=True))
            (loss / micro).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


main()
