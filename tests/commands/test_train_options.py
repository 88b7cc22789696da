"""A training's options travel whole to the command that is typed elsewhere."""

from __future__ import annotations

from pathlib import Path

from samestep.commands.train import TrainOptions


def test_options_are_words_again() -> None:
    words = TrainOptions(Path("/w.safetensors"), 3, "loss", 2).arguments()
    assert words == ["--init", "/w.safetensors", "--evaluate-every", "3", "--best", "loss", "--patience", "2"]
    assert TrainOptions(every_steps=7).arguments() == ["--evaluate-steps", "7"]
    assert TrainOptions().arguments() == []
