"""A training's options travel whole to the command that is typed elsewhere."""

from __future__ import annotations

from samestep.commands import options


def test_options_are_words_again() -> None:
    words = options.wishes("/w.safetensors", 3, "loss", 2)
    assert words == ["--init", "/w.safetensors", "--evaluate-every", "3", "--best", "loss", "--patience", "2"]
    assert options.wishes(None, 1, "", None) == []
