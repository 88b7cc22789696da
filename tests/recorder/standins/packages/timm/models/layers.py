import torch
from torch import nn
from torch.nn.init import trunc_normal_ as trunc_normal_


class DropPath(nn.Module):
    """Drops a row's path with probability p, as stochastic depth does."""

    def __init__(self, p=0.0):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.p or not self.training:
            return x
        kept = torch.rand(x.shape[0], *[1] * (x.ndim - 1)) >= self.p
        return x * kept / (1 - self.p)
