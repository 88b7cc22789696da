"""A training's options travel whole to the command that is typed elsewhere."""

from __future__ import annotations

from pathlib import Path

from samestep.commands.options import arguments
from samestep.commands.train_options import TrainOptions


def test_options_are_words_again() -> None:
    words = arguments(
        TrainOptions(init=Path("/w.safetensors"), evaluate_every=3, best="loss", patience=2), TrainOptions
    )
    assert words == ["--init", "/w.safetensors", "--evaluate-every", "3", "--best", "loss", "--patience", "2"]
    assert arguments(TrainOptions(), TrainOptions) == []
