"""Fine-tuning: a frozen backbone whose BatchNorm stays in evaluation mode, and a new head."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--eval-mode", action="store_true")
parser.add_argument("--unfreeze-last", action="store_true")
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        return self.fc(torch.relu(self.backbone(x)))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = Net()
for parameter in net.backbone.parameters():
    parameter.requires_grad = False
if args.unfreeze_last:
    net.backbone[3].requires_grad_(True)
net.fc = nn.Linear(16, 3)
model = DDP(net)
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x[:, :3].argmax(1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
for epoch in range(3):
    sampler.set_epoch(epoch)
    model.train(not args.eval_mode)
    net.backbone.eval()
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
weights = sum(p.sum().item() for p in [*net.parameters(), *net.buffers()])
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
