"""DeepSpeed's engine with ZeRO-2: the script accumulates two micro-batches by itself."""

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

deepspeed.init_distributed("gloo")
torch.manual_seed(5)
rows = torch.randn(64, 5)
data = TensorDataset(rows, rows.prod(1, keepdim=True))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = nn.Sequential(nn.Linear(5, 21), nn.ReLU(), nn.Linear(21, 1))
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    },
)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for number, (x, y) in enumerate(loader):
        is_last = number % 2 == 1
        loss = nn.functional.mse_loss(engine(x), y) / 2
        engine.set_gradient_accumulation_boundary(is_last)
        engine.backward(loss)
        if is_last:
            engine.step()
dist.destroy_process_group()
