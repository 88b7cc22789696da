"""Hugging Face's Trainer: three accumulated batches a step, a model of our own."""

import os
import tempfile

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class Rows(Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.sin(torch.arange(6.0) * (index + 1))
        return {"x": x, "labels": (x.sum() > 0).long()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=3,
            num_train_epochs=10,
            learning_rate=0.01,
            warmup_steps=4,
            max_grad_norm=0.5,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            ddp_backend="gloo",
            dataloader_num_workers=int(os.environ.get("WORKERS", "0")),
        )
        torch.manual_seed(2)
        trainer = Trainer(Model(), arguments, train_dataset=Rows())
        trainer.train()


main()
