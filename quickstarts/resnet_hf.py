"""Trains a ResNet on a folder of images with Hugging Face's Trainer, one process for each GPU (or CPU core).

    torchrun --nproc-per-node 2 resnet_hf.py --data FOLDER

FOLDER holds train/CLASS/*.jpg and val/CLASS/*.jpg, as ImageNet and CIFAR-10 are often kept. Each epoch prints a line
and adds a folder to checkpoints, from whose last the same command continues. --evaluate prints the loss and the
accuracy of that one, which are the same on any number of processes.
"""

import argparse
import os
import random

import numpy as np
import torch
from accelerate.utils import broadcast
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


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
        return {"images": pixels, "labels": label}

    def set_epoch(self, epoch):  # the Trainer calls it
        self.epoch = epoch


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
    parser.add_argument("--checkpoint", default="checkpoints", help="a folder")
    parser.add_argument("--evaluate", action="store_true", help="only evaluate the checkpoint")
    return parser.parse_args()


class Classifier(nn.Module):
    """A model as the Trainer wants it: from a batch's entries by name, a loss and the outputs."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images, labels):
        logits = self.model(images)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class ImageTrainer(Trainer):
    def get_eval_dataloader(self, eval_dataset=None):
        # dataloader_drop_last would drop rows of the evaluation, too.
        self.args.dataloader_drop_last = False
        loader = super().get_eval_dataloader(eval_dataset)
        self.args.dataloader_drop_last = True
        return loader

    def evaluate(self, *args, **kwargs):
        # Each process has its own BatchNorm statistics until DDP's next forward; the evaluation uses rank 0's on all.
        for buffer in self.accelerator.unwrap_model(self.model).buffers():
            broadcast(buffer, from_process=0)
        return super().evaluate(*args, **kwargs)


class Printer(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, **_):
        if state.is_world_process_zero:
            loss, accuracy = metrics["eval_mean_loss"], metrics["eval_accuracy"]
            epoch = f"epoch {state.epoch - 1:.0f}: " if state.epoch else ""
            print(f"{epoch}loss {loss:.6f}, accuracy {accuracy:.4f}", flush=True)


def figures(prediction):
    """Returns the mean loss and the accuracy of all rows, which the Trainer has gathered, without those it repeated."""
    # Not the Trainer's own eval_loss: a mean of the batches' means, in which repeated rows count.
    logits, labels = torch.from_numpy(prediction.predictions), torch.from_numpy(prediction.label_ids)
    accuracy = (logits.argmax(1) == labels).double().mean()
    return {"mean_loss": F.cross_entropy(logits.double(), labels).item(), "accuracy": accuracy.item()}


def main():
    args = parse_arguments()
    train_set = ImageFolder(os.path.join(args.data, "train"), args.image_size, augment=True)
    val_set = ImageFolder(os.path.join(args.data, "val"), args.image_size)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    # The batch size is that of all processes together: with more of them the training stays the same.
    if args.batch_size % world_size:
        raise SystemExit(f"--batch-size {args.batch_size} does not divide by {world_size} processes")
    settings = TrainingArguments(
        output_dir=args.checkpoint,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size // world_size,  # of one process
        per_device_eval_batch_size=args.batch_size // world_size,
        dataloader_drop_last=True,  # an incomplete batch would weigh its rows more
        dataloader_num_workers=args.workers,
        max_grad_norm=0.0,  # its default clips at 1.0
        use_cpu=not torch.cuda.is_available(),
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    torch.manual_seed(0)  # the same weights on all processes
    model = Classifier(resnet(len(train_set.classes), args.width, args.blocks))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    # Steps of all processes together, so not divided by their number. The rate belongs to the batch size.
    steps = args.epochs * (len(train_set) // args.batch_size)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, steps)
    trainer = ImageTrainer(
        model,
        settings,
        train_dataset=train_set,
        eval_dataset=val_set,
        optimizers=(optimizer, scheduler),
        compute_metrics=figures,
        callbacks=[Printer()],
    )
    trainer.remove_callback(PrinterCallback)
    checkpoint = get_last_checkpoint(args.checkpoint) if os.path.isdir(args.checkpoint) else None
    if args.evaluate:
        trainer._load_from_checkpoint(checkpoint)
        trainer.evaluate()
    else:
        trainer.train(resume_from_checkpoint=checkpoint)


if __name__ == "__main__":
    main()
