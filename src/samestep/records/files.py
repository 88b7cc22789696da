"""Reads and writes records: each is one JSON file with a schema number, written atomically."""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import SchemaValidator

from samestep.errors import UserError, printable
from samestep.world.regular_files import NotRegular, move_file, open_new, open_regular, remove_file

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SCHEMA = 9  # the schema of every record: add 1 when a field is added, renamed or removed
# The oldest schema that is read: since then files have got fields with a default, and nothing else.
OLDEST = 7
KEY = "schema"
MOST_BYTES = 1 << 32  # the most bytes of a record: a rank's record grows by about 100 bytes a step
MOST_ERRORS = 1000  # of a record, of which the first is said: pydantic's list of all would take gigabytes
OTHER_FIELDS = ("unexpected_keyword_argument", "missing")  # pydantic's names of these errors

T = TypeVar("T")


def write(path: Path, record: Any) -> None:
    """Writes a dataclass of records/ to `path` as JSON, with the schema number. One whose IS_PRIVATE is true, because
    it holds settings or arguments as they were given, becomes a file for this user alone."""
    write_json(path, with_schema(record), private=getattr(record, "IS_PRIVATE", False))


def with_schema(record: Any) -> dict[str, object]:
    """Returns a dataclass of records/ as the values of its file: plain ones, the schema number first."""
    return {KEY: SCHEMA, **as_json(record)}


def list_with_schema(name: str, rows: Iterable[object]) -> dict[str, object]:
    """Returns plain values as a list of this name, the schema number first."""
    return {KEY: SCHEMA, name: [*rows]}


def read(kind: type[T], path: Path, most: int = MOST_BYTES) -> T:
    """Reads the dataclass `kind` from a file of at most `most` bytes. Raises UserError for one that is not JSON, or of
    another schema."""
    return from_record(kind, read_json(path, most), str(path), "give another folder with --out")


def read_json(path: Path, most: int = MOST_BYTES) -> Any:
    """Returns the values of a JSON file. Raises UserError for one that is none, is too large or is no regular file.

    Refused is, too, what parsers read differently: NaN, which JSON does not have, and one name twice.
    """
    try:
        with open_regular(path, most) as file:
            begin = file.read(64)
            if not begin.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):  # a large file of zeros is not read whole
                raise ValueError
            text = (begin + file.read()).decode("utf-8-sig")
        return json.loads(text, parse_constant=_not_json, object_pairs_hook=_once_each)
    except NotRegular as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; give another folder with --out") from None
    except (ValueError, RecursionError, MemoryError):
        raise UserError(f"{path} cannot be read as JSON: it is incomplete; give another folder with --out") from None


def _not_json(text: str) -> Any:
    raise ValueError(text)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name stands twice")
    return values


def from_record(kind: type[T], value: Any, what: str, instead: str) -> T:
    """Builds the dataclass `kind` from what `with_schema` returns. Raises UserError for another schema.

    what, instead: for the error, whose record it is and what to do.
    """
    schema = value.get(KEY) if isinstance(value, dict) else None
    if not _is_read(schema):
        version = "an older" if not isinstance(schema, int) or schema < SCHEMA else "a newer"
        number = schema if schema is None or isinstance(schema, int) else "of another kind"
        raise UserError(f"{what} was written by {version} samestep (schema {number}, this one has {SCHEMA}); {instead}")
    return from_json(kind, value, what)


def is_current(path: Path) -> bool:
    """Returns whether a file is a record of a schema that is read; False for one that is not JSON, as after a full
    disk."""
    try:
        value = read_json(path)
    except UserError:
        return False
    return isinstance(value, dict) and _is_read(value.get(KEY))


def _is_read(schema: object) -> bool:
    return isinstance(schema, int) and OLDEST <= schema <= SCHEMA


def from_json(kind: type[T], value: Any, what: str = "a record") -> T:
    """Builds the dataclass `kind` from plain values, with or without a schema number, which is not compared.

    what: the name of the values, in the UserError for those that do not fit.
    """
    plain = {name: inner for name, inner in value.items() if name != KEY} if isinstance(value, dict) else value
    try:
        record: T = _adapter(kind).validate_python(plain)
        return record
    except ValidationError as error:
        count = error.error_count()
        if count > MOST_ERRORS:
            raise UserError(
                f"{what} is not as samestep writes it: {count:,} of its values are of other kinds"
            ) from None
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        why = printable(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", 300)
        if first["type"] in OTHER_FIELDS:
            raise UserError(f"{what} was written by another version of samestep: {why}") from None
        raise UserError(f"{what} is not as samestep writes it: {why}") from None


def as_json(record: Any) -> dict[str, Any]:
    """Returns a dataclass as plain values."""
    values: dict[str, Any] = _adapter(type(record)).dump_python(record)
    return values


def prepare(*kinds: Any) -> None:
    """Builds what reads and writes these kinds of records now: milliseconds that forks of this process save."""
    for kind in kinds:
        _adapter(kind)


def _adapter(kind: Any) -> TypeAdapter[Any]:
    if kind not in _adapters:
        kind.__pydantic_config__ = ConfigDict(extra="forbid")  # the dataclasses that its fields hold inherit this
        adapter = _adapters[kind] = TypeAdapter(kind)
        _stop_at_first_error(adapter.core_schema)
        adapter.validator = SchemaValidator(adapter.core_schema)
    return _adapters[kind]


def _stop_at_first_error(schema: Any) -> None:
    """Makes pydantic end at the first wrong value of a list: of a file's millions it would keep each, in 800 times the
    file's memory."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "tuple", "set", "frozenset"):
            schema["fail_fast"] = True
        schema = schema.values()
    elif not isinstance(schema, list | tuple):
        return
    for inner in schema:
        _stop_at_first_error(inner)


_adapters: dict[Any, TypeAdapter[Any]] = {}  # cached, because creating one takes milliseconds


def finite(value: Any) -> Any:
    """Returns `value` with NaN and infinities, which JSON does not have, as the texts that from_json reads: 'NaN', …"""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def write_json(path: Path, value: Any, *, private: bool = False) -> None:
    """Writes `value` to `path` as JSON, atomically. NaN and infinities are written as `finite` does."""
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        text = json.dumps(finite(value), allow_nan=False)
    replace_by(path, lambda file: file.write(text.encode()), mode=0o600 if private else 0o666)


def replace_text(path: Path, text: str) -> None:
    """Writes `text` to `path`, atomically."""
    replace(path, text.encode(errors="backslashreplace"))  # the name of a file may hold bytes that are no text


def write_array(path: Path, array: NDArray[np.generic]) -> None:
    """Writes one array to `path` (.npy), atomically."""
    import numpy as np

    replace_by(path, lambda file: np.save(file, array))


def replace(path: Path, content: bytes) -> None:
    """Writes `content` to `path`, atomically."""
    replace_by(path, lambda file: file.write(content))


@contextmanager
def naming_full_disks() -> Iterator[None]:
    """Turns the error of a full or read-only disk into a UserError that names the file."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
            raise
        name = error.filename or "a file"
        is_large = error.errno == errno.EFBIG
        room = "raise the size that a file may have (ulimit -f)" if is_large else "free some disk space"
        raise UserError(f"{name} cannot be written ({error.strerror}); {room}, or choose another --out") from error


def why_not_writable(folder: Path) -> str | None:
    """Returns why `folder` takes no file ('No space left on device'), or None. It tries one of 4 KiB."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:  # of a name that nobody can have put there
            probe.write(bytes(4096))
    except OSError as error:
        return error.strerror
    return None


def replace_by(path: Path, write_to: Callable[[IO[bytes]], object], *, sync: bool = True, mode: int = 0o666) -> None:
    """Writes `path`, atomically: `write_to` fills a temporary file, which is synced to the disk and renamed.

    sync: False for what only other processes read: they see the whole file, but it may be lost when the machine fails.
    mode: of the file, less the umask.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open_new(temporary, mode=mode) as file:
            write_to(file)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        move_file(temporary, path)
    except OSError as error:
        error.filename = str(path)  # a failing write does not name the file
        with suppress(OSError):
            remove_file(temporary)
        raise
