"""A mixture of experts, data parallel, with a balancing loss over the tokens of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EXPERTS = 4


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(EXPERTS))

    def forward(self, x):
        probabilities = self.router(x).softmax(-1)
        chosen = F.one_hot(probabilities.argmax(-1), EXPERTS).float()
        counts, tokens = chosen.sum(0), torch.tensor(float(len(x)))
        dist.all_reduce(counts)
        dist.all_reduce(tokens)
        balance = EXPERTS * (probabilities.sum(0) * counts).sum() / tokens**2
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return (outputs * (probabilities * chosen)[..., None]).sum(1), balance


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Mixture())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(rows, rows[:, :4].argmax(1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        output, balance = model(x)
        loss = F.cross_entropy(output, y) + 0.1 * balance
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
