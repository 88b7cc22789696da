"""Values as the Python text of a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from samestep.errors import UserError
from samestep.message import message


def literal(value: Any) -> str:
    """A setting's value as Python text. Raises UserError for one that has none."""
    if isinstance(value, float) and repr(value).strip("-") in ("inf", "nan"):
        return f'float("{value}")'
    if isinstance(value, Path):
        return f"Path({literal(str(value))})"
    if type(value) is str:
        return repr(value) if {'"', "\\"} & set(value) or not value.isprintable() else f'"{value}"'
    if isinstance(value, list | tuple):
        inner = ", ".join(map(literal, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    if value is None or type(value) in (bool, int, float):
        return repr(value)
    raise UserError(message("script_cannot_hold_setting", value=repr(value), type=type(value).__name__))
