"""A step whose auxiliary head is trained only where some row of any rank needs it."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--zero", action="store_true")
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.main, self.aux = nn.Linear(6, 12), nn.Linear(12, 2), nn.Linear(12, 1)

    def forward(self, x, with_aux):
        hidden = torch.relu(self.body(x))
        return self.main(hidden), self.aux(hidden).squeeze(1) if with_aux else None


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(64, 6)
flags = (torch.arange(64) % 7 == 0).float()
data = TensorDataset(x, (x.sum(1) > 0).long(), flags)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = DDP(Net(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets, flagged in loader:
        needed = flagged.sum()
        dist.all_reduce(needed)
        output, aux = model(inputs, bool(needed > 0) or args.zero)
        loss = F.cross_entropy(output, targets)
        if aux is not None:
            loss = loss + 0.5 * (flagged * (aux - inputs[:, 0]).square()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
