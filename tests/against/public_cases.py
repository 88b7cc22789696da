"""Public scripts that only `check --against` runs: most train in one process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planting import Edit
from recorder.public_scripts import CASES
from recorder.public_scripts.case import Case, words
from recorder.public_scripts.pytorch import AT

LLMS = ("rasbt/LLMs-from-scratch", "1ed48c2")
CHAPTER = "ch05/01_main-chapter-code"
APPENDIX = "appendix-A/01_main-chapter-code"
MINGPT = ("karpathy/minGPT", "37baab71b9abea1b76ab957409a1cc2fbfba8a26")


def wikitext(folder: Path) -> None:
    """Makes the texts of word_language_model."""
    draw, target = random.Random(1), folder / "word_language_model" / "data" / "wikitext-2"
    target.mkdir(parents=True, exist_ok=True)
    for name in ("train", "valid", "test"):
        (target / f"{name}.txt").write_text("\n".join(" ".join(draw.choices("abcdefgh", k=9)) for _ in range(200)))


def verdict(folder: Path) -> None:
    """Makes the text of a chapter, which its script would download."""
    draw = random.Random(1)
    (folder / CHAPTER / "the-verdict.txt").write_text("".join(draw.choices("abcdefgh ", k=3000)))


def example(name: str, arguments: str, files: Sequence[str] = ("main",), **others: Any) -> Case:
    """A script of pytorch/examples that trains in one process."""
    parts = tuple(f"{name}/{file}.py" for file in files)
    return Case(f"{name} example", *AT, f"{name}/main.py", words(arguments), cwd=name, parts=parts, ranks=1, **others)


ALONE = (
    example("mnist", "--batch-size 40", packages=("torchvision",)),
    example("vae", "--batch-size 40", packages=("torchvision",)),
    example("mnist_rnn", "--batch-size 40", packages=("torchvision",)),
    example(
        "word_language_model",
        "--use-optimizer --lr 0.01 --emsize 16 --nhid 16 --batch_size 4 --bptt 8 --epochs 2 --model LSTM",
        files=("main", "data", "model"),
        prepare=wikitext,
    ),
    Case(
        "minGPT adder",
        *MINGPT,
        "projects/adder/adder.py",
        words("--trainer.num_workers=0 --trainer.batch_size=8 --trainer.max_iters=20"),
        module="projects.adder.adder",
        parts=("mingpt", "projects"),
        ranks=1,
    ),
    Case(
        "LLMs-from-scratch gpt_train",
        *LLMS,
        f"{CHAPTER}/gpt_train.py",
        cwd=CHAPTER,
        folder=CHAPTER,
        packages=("tiktoken",),
        prepare=verdict,
        sizes=(
            Edit('"vocab_size": 50257', '"vocab_size": 128'),
            Edit('"context_length": 256', '"context_length": 16'),
            Edit('"emb_dim": 768', '"emb_dim": 32'),
            Edit('"n_heads": 12', '"n_heads": 2'),
            Edit('"n_layers": 12', '"n_layers": 2'),
        ),
        ranks=1,
    ),
    Case(
        "LLMs-from-scratch DDP-script",
        *LLMS,
        f"{APPENDIX}/DDP-script.py",
        cwd=APPENDIX,
        folder=APPENDIX,
        on_gpus=True,
    ),
)
AGAINST_CASES = (*CASES, *ALONE)
