"""The schema number follows the fields of the records."""

from __future__ import annotations

import hashlib
from dataclasses import fields, is_dataclass
from importlib import import_module
from pkgutil import iter_modules

from samestep import records
from samestep.records.files import SCHEMA

DIGESTS = {9: "9953a0fe2c1634cf"}  # schema -> a digest of all fields and their types


def test_other_fields_are_another_schema() -> None:
    modules = [import_module(f"samestep.records.{each.name}") for each in iter_modules(records.__path__)]
    kinds = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    lines = sorted(
        f"{kind.__name__}.{field.name}: {field.type}" for kind in kinds if is_dataclass(kind) for field in fields(kind)
    )
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()
    assert DIGESTS.get(SCHEMA) == digest, (
        "fields of records/ have been added, removed or renamed, or have another type: add 1 to SCHEMA in "
        f"records/files.py, and its row here: the digest is now {digest}"
    )
