"""The text encoding of this environment: Python reads files and writes logs with it."""

from __future__ import annotations

import locale
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.world.checks import Finding, LaunchInfo, ok, on_each, warn

GROUP = "environment"


@dataclass(frozen=True)
class Facts:
    """The text encodings of one machine.

    encoding: of open() without one. names: of files. variables: LC_ALL, LC_CTYPE and LANG, those that are set.
    """

    encoding: str
    names: str
    variables: str


def probe(info: LaunchInfo) -> Facts:
    given = [f"{name}={os.environ[name]}" for name in ("LC_ALL", "LC_CTYPE", "LANG") if name in os.environ]
    return Facts(locale.getpreferredencoding(False), sys.getfilesystemencoding(), " ".join(given))


def judge(facts: Mapping[str, Facts]) -> list[Finding]:
    return on_each(facts, _judge)


def _judge(seen: Facts) -> list[Finding]:
    if "utf" not in seen.encoding.lower() or "utf" not in seen.names.lower():
        return warn(
            f"text is {seen.encoding} and file names are {seen.names} here ({seen.variables or 'no LANG'}): reading a "
            "dataset or a tokenizer with other letters raises UnicodeDecodeError",
            "export LC_ALL=C.UTF-8",
        )
    return ok(f"text is {seen.encoding}")
