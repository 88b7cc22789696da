"""DeepSpeed's engine, at a stage of ZeRO: three accumulated micro-batches a step."""

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STAGE = 0


def main() -> None:
    deepspeed.init_distributed("gloo")
    torch.manual_seed(5)
    x = torch.randn(60, 5)
    data = TensorDataset(x, x.prod(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=5, sampler=sampler)
    model = nn.Sequential(nn.Linear(5, 21), nn.ReLU(), nn.Linear(21, 1))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": 5,
            "gradient_accumulation_steps": 3,
            "zero_optimization": {"stage": STAGE},
            "zero_allow_untested_optimizer": True,
        },
    )
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for rows, targets in loader:
            loss = nn.functional.mse_loss(engine(rows), targets)
            engine.backward(loss)
            engine.step()
    dist.destroy_process_group()


main()
