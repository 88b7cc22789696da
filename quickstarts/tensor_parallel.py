"""Trains a GPT on a text with tensor parallelism: each process has a part of each layer, and all read the same rows.

    torchrun --nproc-per-node 2 tensor_parallel.py --text TEXT

For layers that do not fit on one GPU. TEXT is any text, as tiny Shakespeare. A token is a byte. Every --save-every
steps it prints a line and replaces checkpoint.pt, from which the same command continues, in the middle of an epoch and
with another number of processes, too. --evaluate prints the loss of that checkpoint on the last tenth of the text.
"""

import argparse
import itertools
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

TOKENS = 256


class Text(Dataset):
    """Rows of `length` bytes of a file, with the byte that follows each: the first nine tenths, or the last one."""

    def __init__(self, path, length, held_out=False):
        text = np.fromfile(path, np.uint8)
        cut = len(text) * 9 // 10
        self.text, self.length = torch.from_numpy(text[cut:] if held_out else text[:cut]).long(), length

    def __len__(self):
        return (len(self.text) - 1) // self.length

    def __getitem__(self, row):
        window = self.text[row * self.length : (row + 1) * self.length + 1]
        return window[:-1], window[1:]


class Attention(nn.Module):
    # Three layers, not one of 3 * width outputs: its first half would be the queries and half of the keys.
    def __init__(self, width, heads):
        super().__init__()
        self.head_width = width // heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.project = nn.Linear(width, width)

    def forward(self, x):
        rows, length, _ = x.shape
        # -1: the heads that this process has.
        query, key, value = (
            part(x).view(rows, length, -1, self.head_width).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, length, layers, width, heads):
        super().__init__()
        self.token, self.place = nn.Embedding(TOKENS, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, TOKENS, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if "project" in name else 0.02)
        self.head.weight = self.token.weight  # tied

    def forward(self, tokens):
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device)[None])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallelize(model, mesh):
    """Shards the embedding, the attention's heads and the feed-forward layers. The rest stays whole."""
    plan = {"token": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh, plan)
    model.head.weight = model.token.weight  # tied again: each was sharded by itself
    # A layer by columns, then one by rows: its processes add up their outputs, once for the pair.
    columns, rows = ("attention.query", "attention.key", "attention.value", "feed.0"), ("attention.project", "feed.2")
    for block in model.blocks:
        plan = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
        parallelize_module(block, mesh, plan)


def clip_gradients(model, limit):
    """Clips by the norm of the whole model's gradient: that of all parts, and of what is whole, counted once."""
    # clip_grad_norm_ does not take parts (DTensors) and plain tensors together, and by two calls each would be clipped
    # by its own norm.
    parts = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    plain = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    norms = [nn.utils.get_total_norm([parameter.grad for parameter in group]) for group in (parts, plain)]
    norm = torch.hypot(norms[0].full_tensor(), norms[1])  # full_tensor: of the parts on all processes
    for group in (parts, plain):
        nn.utils.clip_grads_with_norm_(group, limit, norm, foreach=False)


@torch.no_grad()
def evaluate(model, dataset, batch_size, device):
    """Returns the mean loss over all tokens. All processes compute it together, from the same rows."""
    total = torch.zeros((), dtype=torch.float64)
    model.eval()
    for inputs, targets in DataLoader(dataset, batch_size):
        losses = F.cross_entropy(model(inputs.to(device)).flatten(0, 1).cpu(), targets.flatten(), reduction="none")
        total += losses.double().sum()
    model.train()
    return total.item() / (len(dataset) * dataset.length)


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", required=True)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=64, help="rows of one step, which all processes read")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="norm of the gradient at most")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
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
    if args.heads % world_size or TOKENS % world_size:
        raise SystemExit(f"--heads {args.heads} and {TOKENS} tokens do not both divide by {world_size} processes")

    train_set, held_out = Text(args.text, args.length), Text(args.text, args.length, held_out=True)
    # One replica, not one for each process: with rows of its own, each would train its part on other rows.
    sampler = DistributedSampler(train_set, num_replicas=1, rank=0, shuffle=True, seed=0, drop_last=True)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)

    torch.manual_seed(0)  # the same weights on all processes, for what stays whole
    model = GPT(args.length, args.layers, args.width, args.heads).to(device)
    parallelize(model, init_device_mesh(device.type, (world_size,)))
    # After sharding: an optimizer of the whole parameters would train nothing. foreach, which is the default on GPUs,
    # does not take parts and plain tensors together.
    adam = {"lr": args.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(model.parameters(), **adam, foreach=False)
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
        loss = evaluate(model, held_out, args.batch_size, device)
        if rank == 0:
            print(f"loss {loss:.6f}")
        step = args.steps

    while step < args.steps:
        epoch, done = divmod(step, len(loader))
        sampler.set_epoch(epoch)  # without it every epoch has the order of the first
        # The batches that were trained before the checkpoint are read again, and left out.
        for inputs, targets in itertools.islice(loader, done, done + args.steps - step):
            # The same loss on all processes, that of one process: nothing to average over them.
            loss = F.cross_entropy(model(inputs.to(device)).flatten(0, 1), targets.to(device).flatten())
            loss.backward()
            clip_gradients(model, args.clip)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            if step % args.save_every == 0 or step == args.steps:
                loss = evaluate(model, held_out, args.batch_size, device)
                # Together: it gathers the parts, and returns the whole on rank 0 alone.
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
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
