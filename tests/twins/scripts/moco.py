"""MoCo: a momentum encoder, a queue of gathered keys, and a loss against the queue's negatives."""

import argparse
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--temperature", type=float, default=0.2)
parser.add_argument("--shuffle", action="store_true")
args = parser.parse_args()


@torch.no_grad()
def concat_all_gather(tensor):
    gathered = [torch.ones_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor, async_op=False)
    return torch.cat(gathered, dim=0)


@torch.no_grad()
def batch_shuffle(x):
    gathered = concat_all_gather(x)
    order = torch.randperm(len(gathered))
    dist.broadcast(order, src=0)
    return gathered[order.view(dist.get_world_size(), -1)[dist.get_rank()]], order.argsort()


@torch.no_grad()
def batch_unshuffle(x, order):
    return concat_all_gather(x)[order.view(dist.get_world_size(), -1)[dist.get_rank()]]


class MoCo(nn.Module):
    def __init__(self, dim=8, size=32):
        super().__init__()
        self.encoder_q = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, dim))
        self.encoder_k = copy.deepcopy(self.encoder_q)
        for parameter in self.encoder_k.parameters():
            parameter.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(dim, size), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data = k.data * args.momentum + q.data * (1.0 - args.momentum)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        keys = concat_all_gather(keys)
        pointer = int(self.queue_ptr)
        self.queue[:, pointer : pointer + keys.shape[0]] = keys.T
        self.queue_ptr[0] = (pointer + keys.shape[0]) % self.queue.shape[1]

    def forward(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            order = None
            if args.shuffle:
                im_k, order = batch_shuffle(im_k)
            k = F.normalize(self.encoder_k(im_k), dim=1)
            if args.shuffle:
                k = batch_unshuffle(k, order)
        positive = (q * k).sum(1, keepdim=True)
        negative = q @ self.queue.clone().detach()
        logits = torch.cat([positive, negative], dim=1) / args.temperature
        self._dequeue_and_enqueue(k)
        return logits, torch.zeros(len(logits), dtype=torch.long)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
base = torch.randn(64, 6)
data = TensorDataset(base + 0.1 * torch.randn(64, 6), base + 0.1 * torch.randn(64, 6))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
model = DDP(MoCo(), broadcast_buffers=False)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for im_q, im_k in loader:
        output, target = model(im_q, im_k)
        loss = F.cross_entropy(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
weights = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f} queue {model.module.queue.sum():.5f}", flush=True)
dist.destroy_process_group()
