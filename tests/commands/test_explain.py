"""samestep explain: a mistake in both languages, the list of all, and an id that is none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from budget import budget
from said import refuses, tells
from samestep.commands.explain import explained, mistakes
from samestep.message import message
from samestep.report.language import VARIABLE
from samestep.rules import rule_ids


@pytest.mark.parametrize(("language", "wrong", "right"), [("en", "Wrong:", "Right:"), ("zh", "错误：", "正确：")])
def test_a_mistake_is_explained_in_both_languages(
    language: str, wrong: str, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, language)
    identity, sentence, broken, mended, patch = explained("set_epoch_never_called")
    assert (identity, "set_epoch" in sentence, "--fix" in patch) == ("set_epoch_never_called", True, True)
    assert broken.startswith(wrong) and "set_epoch" not in broken
    assert mended.startswith(right) and "        sampler.set_epoch(epoch)" in mended


def test_fields_are_shown_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence is that of a finding whose fields are their own names."""
    monkeypatch.setenv(VARIABLE, "en")
    _, sentence, *_ = explained("loss_divided_by_ranks")
    assert "<ranks>" in sentence and "{" not in sentence
    assert tells(sentence, "loss_divided_by_ranks", ranks="<ranks>")


def test_each_mistake_is_listed() -> None:
    assert [line.partition(" ")[0] for line in mistakes()] == sorted(rule_ids())


def test_an_unknown_id_is_one_sentence_with_the_nearest() -> None:
    hint = message("did_you_mean", name="set_epoch_never_called")
    with refuses("no_such_mistake", id="set_epoch_never_caled", hint=hint):
        [*explained("set_epoch_never_caled")]
    with refuses("no_such_mistake", id="xyz", hint=message("explain_lists_mistakes")):
        [*explained("xyz")]
    command = [sys.executable, "-m", "samestep", "explain", "set_epoch_never_caled"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=budget(20))
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")
