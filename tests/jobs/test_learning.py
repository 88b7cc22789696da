"""The built-in jobs learn what their data holds, at the rates of their authors, and are asked about other rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_jobs import HELD_OUT, ROWS, data, settings

from samestep import engine
from samestep.data.schedule import schedule_of
from samestep.job import Job
from samestep.jobs.imagefolder import prepared
from samestep.rank.evaluate import evaluate, plain_model
from samestep.tasks.inspect.load import build
from samestep.training import Run
from samestep.world import World

__all__ = ["data"]  # the fixture

LEARNING = {  # a chance of one in ten, in ten, in two; a perplexity of nine, if all characters were alike
    "cifar10": (["epochs=12", "lr=0.05", "workers=0"], "accuracy", 0.3),
    "imagefolder": (["epochs=12", "lr=0.02"], "top1", 0.3),
    "imdb": (["epochs=8", "lr=0.003", "dropout=0"], "accuracy", 0.9),
    "charlm": (["epochs=12", "lr=0.03", "limit=0"], "perplexity", -2.0),
}


def trained(job: Job) -> dict[str, float]:
    world = World()
    run = Run(job, world, job.epochs * schedule_of(job, 1).steps_per_epoch)
    state = engine.load("single").train(job, world, run)
    return evaluate(job, plain_model(job, state, world), world).means()


@pytest.mark.parametrize("name", LEARNING)
def test_a_job_learns(name: str, data: dict[str, Path]) -> None:
    chosen, metric, least = LEARNING[name]
    job = build(name, settings(name, data) | dict(pair.split("=") for pair in chosen))
    found = trained(job)[metric]
    assert found >= least if least > 0 else found <= -least


@pytest.mark.parametrize("name", ["cifar10", "imagefolder", "imdb"])
def test_what_is_held_out_is_not_what_is_trained_on(name: str, data: dict[str, Path]) -> None:
    job = build(name, settings(name, data))
    assert (len(job.train), len(job.evaluation)) == (ROWS, HELD_OUT)  # type: ignore[arg-type]


def test_the_last_tenth_of_a_text_is_held_out(data: dict[str, Path]) -> None:
    job: Any = build("charlm", settings("charlm", data) | {"limit": "0"})
    text = data["charlm"].read_text()
    first, held_out = job.train[0][0], job.evaluation[0][0]
    number = {character: i for i, character in enumerate(sorted({*text}))}
    assert first.tolist() == [number[character] for character in text[:8]]
    assert held_out.tolist() == [number[character] for character in text[len(text) * 9 // 10 :][:8]]
    few: Any = build("charlm", settings("charlm", data) | {"limit": "20"})
    assert (len(few.train), len(few.evaluation)) == (20, 5)


@pytest.mark.parametrize(
    ("name", "every", "factors"),
    [
        ("cifar10", "epoch", {0: 1, 149: 1, 150: 0.1, 249: 0.1, 250: 0.01}),
        ("imagefolder", "epoch", {0: 1, 29: 1, 30: 0.1, 59: 0.1, 60: 0.01}),
        ("imdb", "step", {0: 0.1, 4: 0.5, 9: 1, 55: 0.5, 99: 0.0111}),  # of 100 steps
        ("charlm", "step", {0: 1, 50: 0.5}),
    ],
)
def test_the_rate_of_a_job(name: str, every: str, factors: dict[int, float], data: dict[str, Path]) -> None:
    steps = {"imdb": {"global_batch": "4", "epochs": "10"}, "charlm": {"global_batch": "4", "epochs": "10"}}
    job = build(name, settings(name, data) | steps.get(name, {}))
    assert job.scheduler is not None and job.scheduler.every == every
    optimizer = job.optimizer.build(torch.nn.Linear(1, 1))
    scheduler = job.scheduler.make(optimizer)
    for number in range(max(factors) + 1):
        if number in factors:
            rate = optimizer.param_groups[0]["lr"] / job.optimizer.settings["lr"]
            assert rate == pytest.approx(factors[number], abs=1e-4), number
        optimizer.step()
        scheduler.step()


def test_an_image_is_evaluated_by_its_middle() -> None:
    """As ImageNet's: the shorter side scaled to 256/224 of the size, then the middle of it."""
    pixels = np.zeros((256, 256, 3), np.uint8)
    pixels[16:240, 16:240] = 255
    assert prepared(pixels, 224).shape == (224, 224, 3) and (prepared(pixels, 224) == 255).all()


def test_imdb_takes_weights_that_transformers_saved(data: dict[str, Path], tmp_path: Path) -> None:
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizerFast

    chosen = settings("imdb", data) | {"dropout": "0"}
    first = build("imdb", chosen)
    model: Any = first.model()
    model.save_pretrained(tmp_path)
    words = BertWordPieceTokenizer(lowercase=True)
    words.train_from_iterator(["the film was awful", "great"], 200, show_progress=False)
    BertTokenizerFast(tokenizer_object=words._tokenizer).save_pretrained(tmp_path)
    job: Any = build("imdb", chosen | {"weights": str(tmp_path)})
    tokens, label = job.train[0]
    assert tokens.shape == (16,) and label in (0, 1)
    batch: Any = SimpleNamespace(inputs=tokens[None])
    again = job.model().eval()
    assert torch.equal(job.forward(again, batch), first.forward(model.eval(), batch))
    assert job.forward(again, batch).shape == (1, 2)
