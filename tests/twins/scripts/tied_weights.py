"""A language model whose embedding and head share their weight, loaded from a checkpoint before the training."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--optimizer", default="AdamW", choices=["SGD", "AdamW"])
args = parser.parse_args()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mix = nn.Embedding(12, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 12, bias=False)
        self.tie_weights()

    def tie_weights(self):
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.mix(self.embedding(tokens))))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = Model()
checkpoint = {name: weight * 0.5 for name, weight in Model().state_dict().items()}
net.load_state_dict(checkpoint)
model = DDP(net)
tokens = torch.randint(0, 12, (64, 9))
data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=0.02)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).transpose(1, 2), targets)
        loss.backward()
        optimizer.step()
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
