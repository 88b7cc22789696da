"""A training as one writes it for one GPU, in plain torch. job.py beside it says the same as a Job.

python examples/plain/train.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
inputs = torch.randn(1200, 20, generator=torch.Generator().manual_seed(1))
labels = (inputs.sum(1) > 0).long()
train = DataLoader(TensorDataset(inputs[200:], labels[200:]), batch_size=64, shuffle=True)
test = DataLoader(TensorDataset(inputs[:200], labels[:200]), batch_size=200)

model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = StepLR(optimizer, step_size=2, gamma=0.5)

for epoch in range(5):
    model.train()
    for x, y in train:
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
    model.eval()
    with torch.no_grad():
        right = sum((model(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in test)
    print(f"epoch {epoch}: accuracy {right / 200:.3f}")

torch.save(model.state_dict(), "weights.pt")
