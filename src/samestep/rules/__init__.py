"""The kinds of mistakes that `samestep check` names, one file for each: samestep/rules/ID.py.

ID is the id of the finding's message. Each file ends with `RULE = Rule(…)`: the sentence in both languages,
the lines of the user's code that it points at, and the patch where one is certain, with an example. The judges, in
judge/, decide whether a training has the mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from samestep.records.call_site import CallSite


@dataclass(frozen=True)
class Rule:
    """One kind of mistake. en, zh: its sentence, as report/language.py reads it.

    lines: where the mistake arises in the user's code, the likeliest place first: each a Place of
    judge/places.py; without any, the places of the finding's question count. patch: changes a Script of
    judge/suggested_patches.py into one without the mistake. broken: example lines with the mistake. right: the
    same lines without it, as the patch changes them, if there is a patch.
    """

    en: str
    zh: str
    lines: Sequence[Callable[[Any], list[CallSite]]] = ()
    patch: Callable[[Any], None] | None = None
    broken: str = ""
    right: str = ""


@cache
def rule_ids() -> frozenset[str]:
    """Returns the ids of all rules."""
    return frozenset(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))


def rule_of(identity: str) -> Rule | None:
    """Returns the rule of a message's id; None for a message of no mistake."""
    if identity not in rule_ids():
        return None
    return cast(Rule, import_module(f"{__name__}.{identity}").RULE)
