"""Trains a tiny Llama with Hugging Face's Trainer, which saves in the second epoch, and can go on from there."""

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Texts(Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(12) * (index + 3) + index) % 32
        labels = tokens.clone()
        labels[3 + index % 8 :] = -100
        return {"input_ids": tokens, "labels": labels}


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, pad_token_id=0
)
arguments = TrainingArguments(
    "checkpoints",
    per_device_train_batch_size=8,
    learning_rate=1e-2,
    max_steps=24,
    report_to=[],
    save_steps=8,
    disable_tqdm=True,
    use_cpu=True,
)
checkpoint = "checkpoints/checkpoint-8" if "--resume" in sys.argv else None
Trainer(LlamaForCausalLM(config), arguments, train_dataset=Texts()).train(resume_from_checkpoint=checkpoint)
