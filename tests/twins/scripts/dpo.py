"""DPO: a frozen reference, chosen and rejected answers joined in one forward, and -logsigmoid of the margin."""

import argparse
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--beta", type=float, default=0.5)
parser.add_argument("--label_smoothing", type=float, default=0.0)
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(11, 12), nn.Linear(12, 12), nn.Linear(12, 11)

    def forward(self, tokens):
        return self.head(torch.tanh(self.mix(self.embedding(tokens))))


def log_probabilities(model, tokens):
    logits = model(tokens[:, :-1]).log_softmax(-1)
    return logits.gather(2, tokens[:, 1:, None]).squeeze(2).sum(1)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randint(0, 8, (64, 7)), torch.randint(3, 11, (64, 7)))
sampler = DistributedSampler(data, seed=4)
loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
policy = LanguageModel()
reference = copy.deepcopy(policy).eval().requires_grad_(False)
policy = DDP(policy)
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for step, (chosen, rejected) in enumerate(loader):
        both = torch.cat([chosen, rejected])
        with torch.no_grad():
            ref_chosen, ref_rejected = log_probabilities(reference, both).chunk(2)
        pi_chosen, pi_rejected = log_probabilities(policy, both).chunk(2)
        margin = (pi_chosen - pi_rejected) - (ref_chosen - ref_rejected)
        smooth = args.label_smoothing
        losses = -F.logsigmoid(args.beta * margin) * (1 - smooth) - F.logsigmoid(-args.beta * margin) * smooth
        loss = losses.mean()
        (loss / args.accumulate).backward()
        if (step + 1) % args.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
weights = sum(p.sum().item() for p in [*policy.parameters(), *reference.parameters()])
print(f"rank {rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
