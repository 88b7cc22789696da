"""Trains a GPT on a text with FSDP2 and gradient accumulation: weights, gradients and optimizer state sharded.

    torchrun --nproc-per-node 2 gpt_fsdp.py --text TEXT

TEXT is any text, as tiny Shakespeare. A token is a byte. Every --save-every steps it prints a line and replaces
checkpoint.pt, from which the same command continues, in the middle of an epoch too. --evaluate prints the loss of that
checkpoint on the last tenth of the text, which is the same on any number of processes.
"""

import argparse
import itertools
import math
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Text(Dataset):
    """Rows of `length` bytes of a file, with the byte that follows each: the first nine tenths, or the last one."""

    def __init__(self, path, length, held_out=False):
        text = np.fromfile(path, np.uint8)
        cut = len(text) * 9 // 10
        self.text, self.length = torch.from_numpy(text[cut:] if held_out else text[:cut]).long(), length

    def __len__(self):
        return (len(self.text) - 1) // self.length

    def __getitem__(self, row):
        if row < 0:
            return torch.zeros(self.length).long(), torch.full((self.length,), -100)
        window = self.text[row * self.length : (row + 1) * self.length + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        rows, length, width = x.shape
        query, key, value = (
            part.view(rows, length, self.heads, -1).transpose(1, 2) for part in self.attend(self.norm1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, length, layers, width, heads=4, tokens=256):
        super().__init__()
        self.token, self.place = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if "project" in name else 0.02)
        self.head.weight = self.token.weight  # tied

    def forward(self, tokens):
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def evaluate(model, dataset, batch_size, device):
    """Returns the mean loss over all tokens, each counted once."""
    rows = list(range(dist.get_rank(), len(dataset), dist.get_world_size()))
    # A forward gathers parameters from all processes, so all need as many rows. DistributedSampler would add some that
    # count twice; the row -1 has targets that nothing counts.
    rows += [-1] * (math.ceil(len(dataset) / dist.get_world_size()) - len(rows))
    total = torch.zeros(2, dtype=torch.float64)
    model.eval()
    for inputs, targets in DataLoader(dataset, batch_size, sampler=rows):
        losses = F.cross_entropy(model(inputs.to(device)).flatten(0, 1).cpu(), targets.flatten(), reduction="none")
        total += torch.tensor([losses.double().sum(), (targets >= 0).sum()])
    model.train()
    total = total.to(device)
    dist.all_reduce(total)  # sums and counts: a mean of means would weigh rows differently
    loss, count = total.tolist()
    return loss / count


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", required=True)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=64, help="rows of one step, over all processes")
    parser.add_argument("--accumulate", type=int, default=2, help="forwards of one step, on each process")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    parser.add_argument("--evaluate", action="store_true", help="only evaluate the checkpoint")
    return parser.parse_args()


def train(args):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # The batch size is that of all processes together: with more of them the training stays the same.
    rows = args.batch_size // (world_size * args.accumulate)  # of one forward
    if rows * world_size * args.accumulate != args.batch_size:
        raise SystemExit(f"--batch-size {args.batch_size} does not divide by {world_size} processes and --accumulate")

    train_set, held_out = Text(args.text, args.length), Text(args.text, args.length, held_out=True)
    # drop_last in both: an incomplete batch would weigh its rows more, and padding would repeat rows.
    sampler = DistributedSampler(train_set, shuffle=True, seed=0, drop_last=True)
    loader = DataLoader(train_set, rows, sampler=sampler, drop_last=True)

    torch.manual_seed(0)  # the same weights on all processes: FSDP shards what each has, and sends nothing
    model = GPT(args.length, args.layers, args.width).to(device)
    for block in model.blocks:
        fully_shard(block)  # its weights are gathered while it computes, and freed again
    fully_shard(model)
    # After sharding: an optimizer of the whole parameters would train nothing.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    # By optimizer steps: not by micro-batches, and not multiplied by the processes.
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.steps, cycle_momentum=False)

    step = 0
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)  # one file, for any number of processes
    if os.path.exists(args.checkpoint):
        saved = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        states = {"model_state_dict": saved["model"], "optim_state_dict": saved["optimizer"]}
        set_state_dict(model, optimizer, **states, options=whole)
        scheduler.load_state_dict(saved["scheduler"])
        step = saved["step"]
    if args.evaluate:
        loss = evaluate(model, held_out, rows, device)
        if rank == 0:
            print(f"loss {loss:.6f}")
        step = args.steps

    while step < args.steps:
        epoch, done = divmod(step, len(loader) // args.accumulate)
        sampler.set_epoch(epoch)  # without it every epoch has the order of the first
        # The batches that were trained before the checkpoint are read again, and left out.
        end = min(len(loader) // args.accumulate, done + args.steps - step)
        batches = itertools.islice(loader, done * args.accumulate, end * args.accumulate)
        for number, (inputs, targets) in enumerate(batches, 1):
            inputs, targets = inputs.to(device), targets.to(device).flatten()
            # Averages the gradients over the processes in the last backward of a step only.
            model.set_requires_gradient_sync(number % args.accumulate == 0)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets)
            (loss / args.accumulate).backward()  # gradients add up: without the division the step is larger
            if number % args.accumulate:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # by the norm of all shards
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            if step % args.save_every == 0 or step == args.steps:
                loss = evaluate(model, held_out, rows, device)
                # Together: it gathers. For models that fill a machine's memory: torch.distributed.checkpoint.save.
                state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=whole)))
                if rank == 0:
                    print(f"step {step}: loss {loss:.6f}", flush=True)
                    state |= {"scheduler": scheduler.state_dict(), "step": step}
                    torch.save(state, f"{args.checkpoint}.new")
                    os.replace(f"{args.checkpoint}.new", args.checkpoint)  # never half a file, whenever it is killed


def main():
    args = parse_arguments()
    dist.init_process_group()  # NCCL where there are GPUs, else gloo
    train(args)
    dist.destroy_process_group()  # not in `train`: DDP's module must be gone, or it may wait for the group for ever


if __name__ == "__main__":
    main()
