"""Accelerate's nlp_example (https://github.com/huggingface/accelerate, examples/nlp_example.py) as a Job: BERT decides
whether two sentences say the same. In our own words; README.md maps its lines.

    samestep verify examples/accelerate_nlp/job.py --nproc 2
    samestep run examples/accelerate_nlp/job.py --engine accelerate --nproc 2 --set weights=BERT --set data=FOLDER

FOLDER holds train.tsv and validation.tsv (label<TAB>sentence<TAB>sentence a line: MRPC can be written so); without one,
the 120 pairs beside this file. `weights` is a local folder that transformers can load, tokenizer and all; without one,
a small BERT starts from its config, with one token a word.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from samestep import Batch, Job, LRSchedule, Recipe

Sample = dict[str, Any]
PAD, CLS, SEP, UNKNOWN, WORDS = 0, 1, 2, 3, 4  # WORDS: the first number of a word


def read(path: Path) -> list[tuple[int, str, str]]:
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    return [(int(label), first, second) for label, first, second in rows]


class Pairs(Dataset[Sample]):
    """Each row: input_ids and token_type_ids, as long as the pair is, and its label."""

    def __init__(self, rows: list[tuple[int, str, str]], encode: Callable[[str, str], tuple[list[int], list[int]]]):
        self.labels = [label for label, _, _ in rows]
        self.encoded = [encode(first, second) for _, first, second in rows]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        ids, types = self.encoded[index]
        return {"input_ids": ids, "token_type_ids": types, "labels": self.labels[index]}


def one_token_a_word(rows: list[tuple[int, str, str]]) -> tuple[Callable[[str, str], tuple[list[int], list[int]]], int]:
    """Returns an encoder with the words of `rows`, and the size of its vocabulary."""
    words = sorted({word for _, *texts in rows for text in texts for word in text.lower().split()})
    number = {word: n for n, word in enumerate(words, WORDS)}

    def encode(first: str, second: str) -> tuple[list[int], list[int]]:
        halves = [[number.get(word, UNKNOWN) for word in text.lower().split()] for text in (first, second)]
        return [CLS, *halves[0], SEP, *halves[1], SEP], [0] * (len(halves[0]) + 2) + [1] * (len(halves[1]) + 1)

    return encode, WORDS + len(words)


def padded(samples: list[Sample]) -> dict[str, Tensor]:
    """collate_fn: pads to the longest pair of this batch."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def column(name: str) -> Tensor:
        return torch.tensor([sample[name] + [PAD] * (longest - len(sample[name])) for sample in samples])

    ids = column("input_ids")
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {
        "input_ids": ids,
        "token_type_ids": column("token_type_ids"),
        "attention_mask": ids != PAD,
        "labels": labels,
    }


def job(
    data: Path = Path(__file__).parent,
    weights: Path | None = None,
    num_epochs: int = 3,
    batch_size: int = 16,
    lr: float = 2e-5,
    warmup: int = 100,
    max_gpu_batch_size: int = 16,
    layers: int = 2,
    hidden: int = 64,
    dropout: float = 0.1,
    seed: int = 42,
) -> Job:
    train, held_out = read(data / "train.tsv"), read(data / "validation.tsv")
    encode, vocabulary = one_token_a_word(train)
    if weights is not None:
        tokenizer = AutoTokenizer.from_pretrained(weights, local_files_only=True)

        def encode(first: str, second: str) -> tuple[list[int], list[int]]:
            tokens = tokenizer(first, second, truncation=True)
            return tokens["input_ids"], tokens["token_type_ids"]

    steps = num_epochs * -(-len(train) // batch_size)

    def model() -> nn.Module:
        torch.manual_seed(seed)
        if weights is not None:
            return BertForSequenceClassification.from_pretrained(weights, num_labels=2, local_files_only=True)
        sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 2}
        sizes |= {"intermediate_size": 4 * hidden, "vocab_size": vocabulary}
        drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        return BertForSequenceClassification(BertConfig(**sizes, **drop))

    def linear_with_warmup(step: int) -> float:
        return min(step / max(1, warmup), max(0.0, (steps - step) / max(1, steps - warmup)))

    def correct(output: Any, batch: Batch) -> Tensor:
        return output.logits.argmax(-1) == batch.data["labels"]

    return Job(
        model=model,
        forward=lambda bert, batch: bert(**batch.data),
        criterion=lambda output, batch: output.loss,
        optimizer=Recipe(torch.optim.AdamW, {"lr": lr}),
        scheduler=LRSchedule(lambda optimizer: LambdaLR(optimizer, linear_with_warmup)),
        train=Pairs(train, encode),
        evaluation=Pairs(held_out, encode),
        collate=padded,
        metrics={"accuracy": correct},
        global_batch=batch_size,
        micro_batch=max_gpu_batch_size,
        epochs=num_epochs,
        seed=seed,
    )
