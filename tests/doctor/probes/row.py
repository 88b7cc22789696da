"""A row of the tests of the probes: facts, and what is found in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# (probe, facts of one machine or of several, status, the message's id, some of its fields, words of the fix)
Row = tuple[str, Any, str, str, Mapping[str, Any], str]
