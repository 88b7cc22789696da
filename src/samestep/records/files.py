"""Reading and writing: each record is one JSON file of one schema, there whole or not at all."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from samestep.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SCHEMA = 2  # of every record; one of another version of samestep is refused
KEY = "schema"

T = TypeVar("T")


def write(path: Path, record: Any) -> None:
    """Writes a dataclass of records/ to `path`, with the schema's number."""
    write_json(path, {KEY: SCHEMA, **as_json(record)})


def read(kind: type[T], path: Path) -> T:
    """The dataclass `kind` that a file holds. Raises UserError for a file of another schema, or of none."""
    try:
        found = json.loads(path.read_text())
    except ValueError:
        raise UserError(f"{path} cannot be read as JSON; give another folder with --out") from None
    schema = found.pop(KEY, None) if isinstance(found, dict) else None
    if schema != SCHEMA:
        whose = "an older" if not isinstance(schema, int) or schema < SCHEMA else "a newer"
        raise UserError(
            f"{path} was written by {whose} samestep (schema {schema}, this one has {SCHEMA}); "
            "give another folder with --out"
        )
    return from_json(kind, found, str(path))


def from_json(kind: type[T], value: Any, what: str = "a record") -> T:
    """The dataclass that plain values describe. Raises UserError, which calls them `what`, where they do not."""
    try:
        found: T = _adapter(kind).validate_python(value)
        return found
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{what} is not as samestep writes it: {place}: {first['msg']}") from None


def as_json(record: Any) -> dict[str, Any]:
    """A dataclass as plain values."""
    found: dict[str, Any] = _adapter(type(record)).dump_python(record)
    return found


def _adapter(kind: Any) -> TypeAdapter[Any]:
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


_adapters: dict[Any, TypeAdapter[Any]] = {}  # making one takes milliseconds


def finite(value: Any) -> Any:
    """`value` with None for numbers that JSON does not know: not a number, and infinite."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, value: Any) -> None:
    """Writes `value` to `path`, whole or not at all."""
    replace(path, json.dumps(value).encode())


def replace_text(path: Path, text: str) -> None:
    """Writes `text` to `path`, whole or not at all."""
    replace(path, text.encode())


def write_array(path: Path, array: NDArray[np.generic]) -> None:
    """Writes one array to `path` (.npy), whole or not at all."""
    import io

    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, array)
    replace(path, buffer.getvalue())


def replace(path: Path, content: bytes) -> None:
    """Writes `content` beside `path`, forces it to the disk and renames it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
