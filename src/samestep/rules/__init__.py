"""What is known of each kind of mistake that `samestep check` names, a file each: samestep/rules/ID.py.

ID is that of the message which a finding says. Each file ends with `RULE = Rule(…)`: the sentence in both languages,
the lines of the user's code that it points at, and the patch where one is certain, with an example. The judges, in
proof/script/, decide whether a training has the mistake.
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

    lines: where in the user's code it arises, the likeliest first: each a Place of proof/script/places.py; without any,
    those of the finding's question count. patch: changes a Script of proof/script/suggested_patches.py into one without
    the mistake. broken, right: lines that have the mistake, and that have it no more: those that the patch makes of
    them, if there is one.
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
