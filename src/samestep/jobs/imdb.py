"""imdb: BERT classifies reviews as good or bad. A. Maas et al., "Learning Word Vectors for Sentiment Analysis", 2011.

    samestep run imdb --set data=FOLDER --set weights=BERT --engine fsdp --nproc 4

FOLDER holds train.tsv and test.tsv, a review a line: text<TAB>label. `weights` is a local folder that transformers can
load, tokenizer and all; without one, a small BERT starts from scratch with a WordPiece tokenizer that is trained on
train.tsv. Full scale: bert-base-uncased, --set epochs=4 --set lr=2e-5 --set length=512, about 94.6 % (C. Sun et al.,
"How to Fine-Tune BERT for Text Classification?", 2019). Small: the defaults, about two minutes on 2 cores.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from samestep import Batch, Job, LRSchedule, Recipe
from samestep.errors import UserError

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def read(path: Path) -> tuple[list[str], Tensor]:
    """Reads a .tsv file. Returns its reviews and their labels [rows], int64."""
    try:
        rows = [line.rpartition("\t") for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); name the folder that holds it: --set data=FOLDER") from None
    if odd := [number for number, (_, _, label) in enumerate(rows, 1) if label.strip() not in ("0", "1")]:
        raise UserError(f"{path}: review {odd[0]} has no label; each of its lines is a review, a tab and 0 or 1")
    return [text for text, _, _ in rows], torch.tensor([int(label) for _, _, label in rows])


def encoder(data: Path, weights: Path | None, length: int, vocabulary: int) -> tuple[Callable[..., Tensor], int]:
    """Returns a function from texts to token ids [rows, length], padded with 0, and the size of the vocabulary."""
    if length < 3:
        raise UserError(f"length is {length}; a review needs a word between [CLS] and [SEP]: give 3 or more")
    if weights is not None:
        if not (weights / "config.json").is_file():
            raise UserError(f"weights={weights} has no config.json; give a folder that transformers can load")
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(weights, local_files_only=True)
        settings: Any = {"truncation": True, "padding": "max_length", "max_length": length, "return_tensors": "pt"}
        return lambda texts: loaded(texts, **settings)["input_ids"], len(loaded)
    from tokenizers import BertWordPieceTokenizer

    texts, trainer = read(data / "train.tsv")[0], BertWordPieceTokenizer(lowercase=True)
    # The trainer numbers the characters inside words in the order of a hash map, which differs between processes, and
    # breaks ties by these numbers: every rank would learn another vocabulary. Given here, their order is fixed.
    inside = sorted({f"##{character}" for text in texts for character in {*trainer.normalize(text)} - {" "}})
    trainer.train_from_iterator(texts, vocabulary, special_tokens=[*SPECIAL, *inside], show_progress=False)
    words = BertWordPieceTokenizer(trainer.get_vocab(), lowercase=True)
    words.enable_truncation(length)
    words.enable_padding(length=length)
    return lambda texts: torch.tensor([encoding.ids for encoding in words.encode_batch(texts)]), words.get_vocab_size()


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
    dropout: float = 0.0,
    seed: int = 0,
    workers: int = 0,
) -> Job:
    from transformers import BertConfig, BertForSequenceClassification

    encode, tokens = encoder(data, weights, length, vocabulary)

    def reviews(name: str) -> TensorDataset:
        texts, labels = read(data / name)
        return TensorDataset(encode(texts), labels)

    train = reviews("train.tsv")
    steps = epochs * -(-len(train) // global_batch)

    def model() -> nn.Module:
        torch.manual_seed(seed)
        if weights is not None:
            return BertForSequenceClassification.from_pretrained(weights, num_labels=2, local_files_only=True)
        sizes: Any = {"vocab_size": tokens, "hidden_size": width, "num_hidden_layers": layers}
        sizes |= {"intermediate_size": 4 * width, "num_attention_heads": max(1, width // 64)}
        sizes |= {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        return BertForSequenceClassification(BertConfig(**sizes))

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
        evaluation=reviews("test.tsv"),
        metrics={"accuracy": MulticlassAccuracy(2, average="micro"), "f1": MulticlassF1Score(2)},
        global_batch=global_batch,
        epochs=epochs,
        clip_norm=1.0,
        seed=seed,
        workers=workers,
    )
