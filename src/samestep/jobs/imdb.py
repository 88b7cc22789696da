"""imdb: BERT tells good reviews from bad ones. A. Maas et al., "Learning Word Vectors for Sentiment Analysis", 2011.

    samestep run imdb --set data=FOLDER --set weights=bert-base-uncased --engine fsdp --nproc 4

FOLDER holds train.tsv and test.tsv, a review a line: text<TAB>label. `weights` is a local folder that transformers can
load, tokenizer and all; without one, a small BERT starts from scratch with a WordPiece tokenizer that is trained on
train.tsv. Full scale: bert-base-uncased, 3 epochs of 32 at 2e-5, about 93.5 % (C. Sun et al., "How to Fine-Tune BERT for
Text Classification?", 2019: 94.6 % with 512 tokens). Small: the defaults, some two minutes on 2 cores.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from samestep import Batch, Job, LRSchedule, Recipe
from samestep.errors import UserError


class Reviews(Dataset[Any]):
    """(token numbers [at most `length`], label) of each review."""

    def __init__(self, path: Path, encode: Any, length: int) -> None:
        texts, labels = read(path)
        self.tokens = [torch.tensor(numbers) for numbers in encode(texts, length)]
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.tokens[index], self.labels[index]


def read(path: Path) -> tuple[list[str], list[int]]:
    try:
        lines = [line.rpartition("\t") for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [text for text, _, _ in lines], [int(label) for _, _, label in lines]
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); each of its lines is a review, a tab and 0 or 1") from None


def tokenizer_of(data: Path, weights: Path | None, vocabulary: int) -> tuple[Any, int]:
    """A function (texts, length) -> lists of numbers, and how many tokens there are. 0 pads."""
    if weights is not None:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(weights, local_files_only=True)
        return lambda texts, length: loaded(texts, truncation=True, max_length=length)["input_ids"], len(loaded)
    from tokenizers import BertWordPieceTokenizer

    trained = BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(read(data / "train.tsv")[0], vocab_size=vocabulary, show_progress=False)

    def encode(texts: list[str], length: int) -> list[list[int]]:
        trained.enable_truncation(length)
        return [encoding.ids for encoding in trained.encode_batch(texts)]

    return encode, trained.get_vocab_size()


def padded(samples: list[tuple[Tensor, int]], length: int) -> tuple[Tensor, Tensor]:
    """Token numbers [rows, length], zeros after the end; labels [rows]. Always `length`, so that no row depends on
    its neighbours."""
    tokens = torch.zeros(len(samples), length, dtype=torch.long)
    for row, (numbers, _) in zip(tokens, samples):
        row[: len(numbers)] = numbers
    return tokens, torch.tensor([label for _, label in samples])


def job(
    data: Path = Path("imdb"),
    weights: Path | None = None,
    global_batch: int = 32,
    lr: float = 3e-4,
    epochs: int = 2,
    length: int = 128,
    layers: int = 2,
    width: int = 128,
    vocabulary: int = 8000,
    seed: int = 0,
    workers: int = 0,
) -> Job:
    from transformers import BertConfig, BertForSequenceClassification

    encode, tokens = tokenizer_of(data, weights, vocabulary)
    train, test = (Reviews(data / name, encode, length) for name in ("train.tsv", "test.tsv"))
    steps = epochs * -(-len(train) // global_batch)

    def model() -> nn.Module:
        torch.manual_seed(seed)
        if weights is not None:
            return BertForSequenceClassification.from_pretrained(weights, num_labels=2, local_files_only=True)
        sizes = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 4 * width}
        return BertForSequenceClassification(BertConfig(tokens, num_attention_heads=max(1, width // 64), **sizes))

    def warmed_up(step: int) -> float:
        return min((step + 1) / max(1, steps // 10), (steps - step) / max(1, steps - steps // 10))

    def forward(network: nn.Module, batch: Batch) -> Tensor:
        return network(input_ids=batch.inputs, attention_mask=batch.inputs != 0).logits  # type: ignore[no-any-return]

    return Job(
        model=model,
        forward=forward,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.AdamW, {"lr": lr, "weight_decay": 0.01}),
        scheduler=LRSchedule(lambda optimizer: LambdaLR(optimizer, warmed_up)),
        train=train,
        collate=partial(padded, length=length),
        evaluation=test,
        metrics={"accuracy": lambda output, batch: output.argmax(1) == batch.targets},
        global_batch=global_batch,
        epochs=epochs,
        clip_norm=1.0,
        seed=seed,
        workers=workers,
    )
