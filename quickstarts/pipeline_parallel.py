"""Trains a GPT on a text with pipeline parallelism: each process has a stage, some of the blocks.

    torchrun --nproc-per-node 2 pipeline_parallel.py --text TEXT

For models that do not fit on one GPU. TEXT is any text, as tiny Shakespeare. A token is a byte. Every --save-every
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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
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
        # By name, so that a stage's blocks have the names that they have in the whole model.
        self.blocks = nn.ModuleDict({str(number): Block(width, heads) for number in range(layers)})
        # The head's weight is not the embedding's: tied, it would be on two stages, whose gradients are to be added up.
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if "project" in name else 0.02)

    def forward(self, x):
        if self.token is not None:
            x = self.token(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def keep_stage(model, stage, stages):
    """Drops what is not of this stage: the first has the embeddings, the last the head, and each some of the blocks."""
    layers = len(model.blocks)
    for number in range(layers):
        if number * stages // layers != stage:
            del model.blocks[str(number)]
    if stage > 0:
        model.token = model.place = None
    if stage < stages - 1:
        model.norm = model.head = None
    return model


def mean_loss(outputs, targets):
    # A mean: the schedule divides the gradients by the number of micro-batches.
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def clip_gradients(model, limit):
    """Clips by the norm of the whole model's gradient, that of all stages."""
    squared = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]) ** 2
    dist.all_reduce(squared)  # without it each stage would be clipped by its own norm
    nn.utils.clip_grads_with_norm_(model.parameters(), limit, squared.sqrt())


@torch.no_grad()
def evaluate(model, dataset, args, device):
    """Returns the mean loss over all tokens, each counted once, on all processes."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    schedule = ScheduleGPipe(PipelineStage(model, rank, world_size, device), args.micro_batches)  # forwards alone
    # A stage receives as many rows each time: the rows -1 fill the last batch, with targets that nothing counts.
    rows = [*range(len(dataset)), *[-1] * (-len(dataset) % args.batch_size)]
    total = torch.zeros(2, dtype=torch.float64)
    model.eval()
    for inputs, targets in DataLoader(dataset, args.batch_size, sampler=rows):
        outputs = schedule.step(*([inputs.to(device)] if rank == 0 else []))
        if rank == world_size - 1:
            losses = F.cross_entropy(outputs.flatten(0, 1).cpu(), targets.flatten(), reduction="none")
            total += torch.tensor([losses.double().sum(), (targets >= 0).sum()])
    model.train()
    total = total.to(device)
    dist.all_reduce(total)  # the last stage's, and zeros
    loss, count = total.tolist()
    return loss / count


def gather_state(model, optimizer):
    """Returns on rank 0 the model's and the optimizer's state of all stages, by the names of the whole model."""
    options = StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=True)
    states = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(get_state_dict(model, optimizer, options=options), states)
    merged = {"model": {}, "optimizer": {}}
    for model_state, optimizer_state in states or []:
        merged["model"].update(model_state)
        merged["optimizer"].update(optimizer_state)
    return merged


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", required=True)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=64, help="rows of one step")
    parser.add_argument("--micro-batches", type=int, default=4, help="of one step: more leave the stages less idle")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="norm of the gradient at most")
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
    # Micro-batches of unequal rows would weigh them differently.
    if args.batch_size % args.micro_batches or args.layers < world_size:
        raise SystemExit("--batch-size does not divide by --micro-batches, or there are more processes than --layers")

    train_set, held_out = Text(args.text, args.length), Text(args.text, args.length, held_out=True)
    # One replica, not one for each process: the last stage needs the targets of the rows that the first one reads.
    sampler = DistributedSampler(train_set, num_replicas=1, rank=0, shuffle=True, seed=0, drop_last=True)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)

    torch.manual_seed(0)  # the same weights on all processes, of which each keeps its stage
    model = keep_stage(GPT(args.length, args.layers, args.width), rank, world_size).to(device)
    schedule = Schedule1F1B(PipelineStage(model, rank, world_size, device), args.micro_batches, loss_fn=mean_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.steps, cycle_momentum=False)

    step = 0
    if os.path.exists(args.checkpoint):
        saved = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        stage = {name: saved["model"][name] for name in model.state_dict()}
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        states = {"model_state_dict": stage, "optim_state_dict": saved["optimizer"]}
        set_state_dict(model, optimizer, **states, options=options)
        scheduler.load_state_dict(saved["scheduler"])
        step = saved["step"]
    if args.evaluate:
        loss = evaluate(model, held_out, args, device)
        if rank == 0:
            print(f"loss {loss:.6f}")
        step = args.steps

    while step < args.steps:
        epoch, done = divmod(step, len(loader))
        sampler.set_epoch(epoch)  # without it every epoch has the order of the first
        # The batches that were trained before the checkpoint are read again, and left out.
        for inputs, targets in itertools.islice(loader, done, done + args.steps - step):
            # All processes call it: forwards and backwards of all micro-batches. Only the last stage has the loss.
            schedule.step(*([inputs.to(device)] if rank == 0 else []), target=targets.to(device))
            clip_gradients(model, args.clip)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            if step % args.save_every == 0 or step == args.steps:
                loss = evaluate(model, held_out, args, device)
                state = gather_state(model, optimizer)
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
