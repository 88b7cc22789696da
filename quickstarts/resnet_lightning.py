"""Trains a ResNet on a folder of images with Lightning's Trainer, one process for each GPU (or CPU core).

    torchrun --nproc-per-node 2 resnet_lightning.py --data FOLDER

FOLDER holds train/CLASS/*.jpg and val/CLASS/*.jpg, as ImageNet and CIFAR-10 are often kept. Each epoch prints a line
and replaces checkpoint.ckpt, from which the same command continues. --evaluate prints the loss and the accuracy of that
checkpoint, which are the same on any number of processes.
"""

import argparse
import math
import os
import random

import numpy as np
import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler


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
        if index < 0:
            return torch.zeros(3, self.size, self.size), -100
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
    parser.add_argument("--checkpoint", default="checkpoint.ckpt")
    parser.add_argument("--evaluate", action="store_true", help="only evaluate the checkpoint")
    return parser.parse_args()


class Classifier(LightningModule):
    def __init__(self, args, classes, train_set, steps):
        super().__init__()
        self.args, self.train_set, self.steps = args, train_set, steps
        self.model = resnet(classes, args.width, args.blocks)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.args.lr, momentum=0.9, weight_decay=5e-4)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.args.lr, self.steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]  # its default is "epoch"

    def on_train_epoch_start(self):
        self.train_set.epoch = self.current_epoch

    def training_step(self, batch, number):
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)  # DDP averages the gradients over the processes

    def on_validation_epoch_start(self):
        # Each process has its own BatchNorm statistics until the next forward: the evaluation uses rank 0's.
        for buffer in self.model.buffers():
            buffer.copy_(self.trainer.strategy.broadcast(buffer, src=0))
        self.total = torch.zeros(3, dtype=torch.float64, device=self.device)

    def validation_step(self, batch, number):
        images, labels = batch
        output = self.model(images)
        loss = F.cross_entropy(output, labels, reduction="none", ignore_index=-100).double().sum()
        self.total += torch.stack([loss, (output.argmax(1) == labels).sum(), (labels >= 0).sum()])

    def on_validation_epoch_end(self):
        # Sums and counts: self.log(..., sync_dist=True) takes a mean of means, which weighs rows differently.
        loss, correct, count = self.trainer.strategy.reduce(self.total, reduce_op="sum").tolist()
        self.print(f"epoch {self.current_epoch}: loss {loss / count:.6f}, accuracy {correct / count:.4f}")


def rows_of_rank(dataset, rank, world_size):
    """Returns rows for the evaluation, as many on each process: -1 is a row with a label that nothing counts."""
    rows = list(range(rank, len(dataset), world_size))
    return rows + [-1] * (math.ceil(len(dataset) / world_size) - len(rows))


def main():
    args = parse_arguments()
    # torchrun has started the processes.
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    train_set = ImageFolder(os.path.join(args.data, "train"), args.image_size, augment=True)
    val_set = ImageFolder(os.path.join(args.data, "val"), args.image_size)
    # The batch size is that of all processes together: with more of them the training stays the same.
    if args.batch_size % world_size:
        raise SystemExit(f"--batch-size {args.batch_size} does not divide by {world_size} processes")
    # drop_last in both: an incomplete batch would weigh its rows more, and padding would repeat rows.
    sampler = DistributedSampler(train_set, world_size, rank, shuffle=True, seed=0, drop_last=True)
    loader = DataLoader(
        train_set, args.batch_size // world_size, sampler=sampler, num_workers=args.workers, drop_last=True
    )
    val_loader = DataLoader(val_set, args.batch_size, sampler=rows_of_rank(val_set, rank, world_size))

    seed_everything(0)  # the same weights on all processes
    module = Classifier(args, len(train_set.classes), train_set, args.epochs * len(loader))
    name = os.path.abspath(args.checkpoint).removesuffix(".ckpt")
    trainer = Trainer(
        devices=local,
        num_nodes=world_size // local,
        strategy="ddp",
        max_epochs=args.epochs,
        # Not Lightning's own sampler, which pads, in the evaluation too. It calls set_epoch of this one.
        use_distributed_sampler=False,
        callbacks=[ModelCheckpoint(*os.path.split(name), enable_version_counter=False)],
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
    )
    checkpoint = f"{name}.ckpt" if os.path.exists(f"{name}.ckpt") else None
    if args.evaluate:
        trainer.validate(module, val_loader, ckpt_path=checkpoint, verbose=False)
    else:
        trainer.fit(module, loader, val_loader, ckpt_path=checkpoint)


if __name__ == "__main__":
    main()
