"""The twins of `samestep check`: each fault applies to its script, and has a line, an id and a healthy twin."""

from __future__ import annotations

import re

from corpus import FAULTS, HEALTHY
from corpus.healthy import VARIANTS
from corpus.twin import SCRIPTS, line_of, text_of


def test_each_fault_applies_and_has_a_line() -> None:
    for fault in FAULTS:
        compile(text_of(fault), fault.name, "exec")
        assert line_of(fault)
        assert re.fullmatch(r"[a-z0-9_]+", fault.kind) and fault.why
        re.compile(fault.words)


def test_each_fault_has_a_healthy_twin() -> None:
    healthy = {(twin.script, twin.arguments) for twin in HEALTHY}
    assert {(fault.script, fault.arguments) for fault in FAULTS} <= healthy
    assert len({twin.name for twin in (*HEALTHY, *FAULTS)}) == len(HEALTHY) + len(FAULTS)


def test_each_script_is_a_twin() -> None:
    scripts = {str(path.relative_to(SCRIPTS).with_suffix("")) for path in SCRIPTS.rglob("*.py")}
    assert scripts - {"project/models/net"} == set(VARIANTS)
    assert len(HEALTHY) >= 60 and len(FAULTS) >= 120
