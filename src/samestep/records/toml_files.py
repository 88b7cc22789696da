"""Reads the package's own tables of facts and sentences."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the tables of a TOML file."""
    tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    return tables
