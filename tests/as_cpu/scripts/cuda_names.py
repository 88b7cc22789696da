"""A training that names its GPUs in every usual way."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from flash_attn import flash_attn_func
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 2, 12).chunk(3, dim=-1)
        return x + flash_attn_func(q, k, v, causal=True).flatten(2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.attention, self.head = Attention(), nn.Linear(8, 4)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x))).transpose(1, 2)
        return self.head(self.attention(x).mean(1)) + torch.zeros(4, device=torch.cuda.current_device())


assert torch.cuda.is_available() and torch.cuda.device_count() == int(os.environ["LOCAL_WORLD_SIZE"])
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device(f"cuda:{local_rank}")
torch.cuda.set_device(device)
dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
assert torch.cuda.current_device() == local_rank
torch.cuda.manual_seed_all(1)
torch.manual_seed(1)
model = nn.SyncBatchNorm.convert_sync_batchnorm(Net()).to(local_rank)
torch.save(model.state_dict(), f"start-{local_rank}.pt")
model.load_state_dict(torch.load(f"start-{local_rank}.pt", map_location={"cuda:0": f"cuda:{local_rank}"}))
model = DistributedDataParallel(torch.compile(model), device_ids=[local_rank], output_device=local_rank)
generator = torch.Generator(device="cuda").manual_seed(2)
x = torch.randn(96, 3, 5, device="cuda", generator=generator).cpu()
y = torch.randint(0, 4, (96,), device=device, generator=generator).cpu()
sampler = DistributedSampler(TensorDataset(x, y), seed=3)
loader = DataLoader(sampler.dataset, batch_size=8, sampler=sampler, pin_memory=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
scaler = torch.amp.GradScaler("cuda")
stream = torch.cuda.Stream()
for epoch in range(2):
    sampler.set_epoch(epoch)
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    for inputs, targets in loader:
        with torch.cuda.stream(stream):
            inputs, targets = inputs.cuda(non_blocking=True), targets.to(device=local_rank, non_blocking=True)
        torch.cuda.current_stream().wait_stream(stream)
        inputs.record_stream(torch.cuda.current_stream())
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    ended.record()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    if local_rank == 0:
        print(f"{mean.item():.3f} {begun.elapsed_time(ended):.0f} ms {torch.cuda.max_memory_allocated()} of {total}")
    dist.barrier(device_ids=[local_rank])
sent = [torch.full((rank + 1,), float(local_rank), device=device) for rank in range(dist.get_world_size())]
received = [torch.empty(local_rank + 1, device=device) for _ in sent]
dist.all_to_all(received, sent)
assert [part[0].item() for part in received] == [float(rank) for rank in range(dist.get_world_size())]
dist.destroy_process_group()
