"""A character model without a DataLoader: three micro-batches a step, the gradients reduced in the last one."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

MICRO = 3
dist.init_process_group("gloo")
torch.manual_seed(0)
text = torch.randint(0, 16, (2000,))
model = DistributedDataParallel(nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(1 + dist.get_rank())
for _ in range(20):
    optimizer.zero_grad()
    for micro in range(MICRO):
        start = torch.randint(0, len(text) - 9, (4,))
        x = torch.stack([text[i : i + 8] for i in start])
        y = torch.stack([text[i + 1 : i + 9] for i in start])
        model.require_backward_grad_sync = micro == MICRO - 1
        logits = model(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten()) / MICRO
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
dist.destroy_process_group()
