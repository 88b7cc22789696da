"""A character model without a DataLoader and without a wrapper: random windows of a text, gradients reduced by hand."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TEXT = "".join(random.Random(0).choices("etaoin shrdlu", k=4000))
LENGTH, ROWS = 16, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 24)
        self.mix = nn.GRU(24, 24, batch_first=True)
        self.head = nn.Linear(24, 128)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.head(self.mix(self.embed(x))[0])
        return F.cross_entropy(out.flatten(0, 1), y.flatten())


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(100 + dist.get_rank())
    text = torch.tensor([ord(c) for c in TEXT])
    model = Model()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    try:
        for _ in range(100):
            starts = torch.randint(len(text) - LENGTH - 1, (ROWS,))
            windows = torch.stack([text[start : start + LENGTH + 1] for start in starts])
            loss = model(windows[:, :-1], windows[:, 1:])
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    finally:
        dist.destroy_process_group()


main()
