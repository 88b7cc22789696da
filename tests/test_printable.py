"""Text from elsewhere that reaches a terminal: what acts on it is shown as an escape, and its length is bounded."""

from __future__ import annotations

import sys
import unicodedata

import pytest

from samestep.errors import LONGEST_MESSAGE, printable, say

HOSTILE = {
    "\x1b[2J": r"\x1b[2J",
    "a\nrm -rf ~": r"a\nrm -rf ~",
    "a\rb\bc\x7f\x00\x85\x9b": r"a\rb\x08c\x7f\x00\x85\x9b",
    "\u202egnp.exe\u2066": r"\u202egnp.exe\u2066",
    "\ud800": r"\ud800",
    "\u2028\u2029\ufeff\U000e0041\uffff": r"\u2028\u2029\ufeff\U000e0041\uffff",
}


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_what_acts_on_a_terminal_is_shown_as_an_escape(text: str) -> None:
    assert printable(text) == HOSTILE[text]


@pytest.mark.parametrize("text", ["plain", "Zürich 深圳　全角", "می\u200cخواهم", "👩\u200d💻", "a\\n", "1\xa0000", ""])
def test_words_of_every_language_stay_as_they_are(text: str) -> None:
    assert printable(text) == text


def test_no_character_that_acts_is_left() -> None:
    shown = printable("".join(map(chr, range(sys.maxunicode + 1))), limit=sys.maxunicode + 1)
    acting = {character for character in shown if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    assert acting == {"\u200c", "\u200d"}
    shown.encode()  # no lone surrogate


def test_long_text_is_cut() -> None:
    assert printable("x" * 10, 10) == "x" * 10
    assert printable("x" * 11, 10) == "x" * 9 + "…"
    assert printable("a\n\tb\x1b", lines=True) == "a\n\tb\\x1b"


def test_a_message_is_one_message_however_long_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    say("the script raised\nsamestep: all is well\x1b[1A" + "x" * 10**6)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "samestep: the script raised"
    assert second.startswith(r"  samestep: all is well\x1b[1A")
    assert len(second) < LONGEST_MESSAGE + 10
