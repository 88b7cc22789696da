"""Trains a ResNet on a folder of images with DDP and ZeroRedundancyOptimizer (ZeRO stage 1).

    torchrun --nproc-per-node 2 resnet_zero.py --data FOLDER

Each process keeps the optimizer's state of a part of the parameters, and updates it for all.

FOLDER holds train/CLASS/*.jpg and val/CLASS/*.jpg, as ImageNet and CIFAR-10 are often kept. Each epoch prints a line
and replaces checkpoint.pt, from which the same command continues. --evaluate prints the loss and the accuracy of that
checkpoint, which are the same on any number of processes.
"""

import argparse
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset


class ImageFolder(Dataset):
    """The images of FOLDER/CLASS/*, as (3, size, size) floats, with the number of their class."""

    def __init__(self, folder, size, augment=False):
        self.classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        self.files = [
            (os.path.join(folder, name, file), label)
            for label, name in enumerate(self.classes)
            for file in sorted(os.listdir(os.path.join(folder, name)))  # file systems list in orders of their own
        ]
        self.size, self.augment, self.epoch = size, augment, 0

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        path, label = self.files[index]
        image = Image.open(path).convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1
        # Drawn from the epoch and the row alone: the same on any number of processes and of loader workers.
        if self.augment and random.Random(f"{self.epoch} {index}").random() < 0.5:
            pixels = pixels.flip(-1)
        return pixels, label


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x):
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


def resnet(classes, width, blocks):
    layers, channels = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()], width
    for stage in range(3):
        for block in range(blocks):
            outputs, stride = width * 2**stage, 2 if stage and not block else 1
            layers.append(Block(channels, outputs, stride))
            channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128, help="rows of one step, over all processes")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--width", type=int, default=32, help="channels of the first of three stages")
    parser.add_argument("--blocks", type=int, default=3, help="in each stage")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    parser.add_argument("--evaluate", action="store_true", help="only evaluate the checkpoint")
    return parser.parse_args()


@torch.no_grad()
def evaluate(model, dataset, batch_size, device):
    """Returns the mean loss and the accuracy over all rows, each counted once."""
    # Each process has its own BatchNorm statistics until DDP's next forward; the evaluation uses rank 0's on all.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    # Not DistributedSampler: it repeats rows until all processes have as many. Not the DDP wrapper either: its forward
    # may broadcast, and would wait for processes that have fewer batches.
    rows = range(dist.get_rank(), len(dataset), dist.get_world_size())
    total = torch.zeros(3, dtype=torch.float64)
    model.eval()
    for images, labels in DataLoader(Subset(dataset, rows), batch_size):
        output = model(images.to(device)).cpu()
        loss = F.cross_entropy(output, labels, reduction="none").double().sum()
        total += torch.stack([loss, (output.argmax(1) == labels).sum(), torch.tensor(len(labels))])
    model.train()
    total = total.to(device)
    dist.all_reduce(total)  # sums and counts: a mean of means would weigh rows differently
    loss, correct, count = total.tolist()
    return loss / count, correct / count


def train(args):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    train_set = ImageFolder(os.path.join(args.data, "train"), args.image_size, augment=True)
    val_set = ImageFolder(os.path.join(args.data, "val"), args.image_size)
    # The batch size is that of all processes together: with more of them the training stays the same.
    if args.batch_size % world_size:
        raise SystemExit(f"--batch-size {args.batch_size} does not divide by {world_size} processes")
    # drop_last in both: an incomplete batch would weigh its rows more, and padding would repeat rows.
    sampler = DistributedSampler(train_set, shuffle=True, seed=0, drop_last=True)
    loader = DataLoader(
        train_set, args.batch_size // world_size, sampler=sampler, num_workers=args.workers, drop_last=True
    )

    torch.manual_seed(0)  # the same weights on all processes; DDP would send rank 0's, other wrappers do not
    model = resnet(len(train_set.classes), args.width, args.blocks).to(device)
    ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=args.lr, momentum=0.9, weight_decay=5e-4
    )
    # Steps of all processes together, so not divided by their number. The rate belongs to the batch size.
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.epochs * len(loader))

    training = {"epochs": args.epochs, "batch_size": args.batch_size, "images": len(train_set)}
    training["classes"] = train_set.classes
    first_epoch = 0
    if os.path.exists(args.checkpoint):
        saved = torch.load(args.checkpoint, map_location=device, weights_only=True)
        if saved["training"] != training and not args.evaluate:  # its schedule would be another, or end
            raise SystemExit(f"{args.checkpoint} is of another training, {saved['training']}: use another --checkpoint")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])  # its momentum: without it the next step is another one
        scheduler.load_state_dict(saved["scheduler"])
        first_epoch = saved["epoch"] + 1
    if args.evaluate:
        loss, accuracy = evaluate(model, val_set, args.batch_size, device)
        if rank == 0:
            print(f"loss {loss:.6f}, accuracy {accuracy:.4f}")
        first_epoch = args.epochs
    elif first_epoch == args.epochs and rank == 0:
        print(f"{args.checkpoint} has all {args.epochs} epochs: nothing is left to train")

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)  # without it every epoch has the order of the first
        train_set.epoch = epoch  # the loader's workers start with a copy of the data set
        for images, labels in loader:
            loss = F.cross_entropy(ddp(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()  # averages the gradients over the processes
            optimizer.step()  # updates a part of the parameters, and sends it to the others
            scheduler.step()
        optimizer.consolidate_state_dict(to=0)  # together, before rank 0 can save the whole state
        val_loss, accuracy = evaluate(model, val_set, args.batch_size, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {val_loss:.6f}, accuracy {accuracy:.4f}", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save({**state, "scheduler": scheduler.state_dict(), "training": training}, f"{args.checkpoint}.new")
            os.replace(f"{args.checkpoint}.new", args.checkpoint)  # never half a file, whenever it is killed


def main():
    args = parse_arguments()
    dist.init_process_group()  # NCCL where there are GPUs, else gloo
    train(args)
    dist.destroy_process_group()  # not in `train`: DDP's module must be gone, or it may wait for the group for ever


if __name__ == "__main__":
    main()
