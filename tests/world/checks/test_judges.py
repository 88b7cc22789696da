"""What each check says of facts as machines have given them, good and bad: its status, its words, and what fixes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from samestep.records.files import as_json, from_json
from samestep.world import checks
from samestep.world.checks import collective, interfaces
from world.checks.rows import environment, gpu, host, launch, network

SEEN = [*launch.SEEN, *host.SEEN, *environment.SEEN, *gpu.SEEN, *network.SEEN]


@pytest.mark.parametrize(("name", "facts", "status", "why", "fix"), SEEN)
def test_a_check_says(name: str, facts: Any, status: str, why: str, fix: str) -> None:
    """The facts have been through JSON, as those of another machine."""
    check = checks.load(name)
    kind = check.Facts
    if checks.is_measured(name):
        found = check.judge(from_json(kind, as_json(facts)))
    else:
        each: Mapping[str, Any] = facts if isinstance(facts, dict) else {"h0": facts}
        found = check.judge({host: from_json(kind, as_json(seen)) for host, seen in each.items()})
    worst = max(found, key=lambda one: ("OK", "UNKNOWN", "WARN", "FAIL").index(one.status))
    assert worst.status == status, found
    assert why in worst.why and fix in worst.fix, worst
    assert bool(worst.fix) == (status in ("WARN", "FAIL")), worst


def test_every_check_is_judged_well_and_badly() -> None:
    for name in checks.names():
        seen = {status for check, _, status, _, _ in SEEN if check == name}
        assert "OK" in seen and seen & {"WARN", "FAIL"}, name


@pytest.mark.parametrize(
    ("backend", "machines_", "expected"),
    [
        ("gloo", 1, [{"GLOO_SOCKET_IFNAME": "eth0"}, {"GLOO_SOCKET_IFNAME": "lo"}]),
        ("gloo", 2, [{"GLOO_SOCKET_IFNAME": "eth0"}]),
    ],
)
def test_the_settings_that_are_tried(backend: str, machines_: int, expected: list[dict[str, str]]) -> None:
    assert collective.candidates(["eth0", "lo"], backend, machines_) == expected
    with_gpus = collective.candidates(["eth0", "lo"], "nccl", machines_)
    assert {"NCCL_P2P_DISABLE": "1"} in with_gpus and {"NCCL_IB_DISABLE": "1"} in with_gpus


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("eth", "eth0", True),
        ("=eth", "eth0", False),
        ("=eth0,eth1", "eth1", True),
        ("^docker,lo", "eth0", True),
        ("^docker,lo", "docker0", False),
        ("^=docker0", "docker01", True),
    ],
)
def test_nccls_pattern(pattern: str, name: str, fits: bool) -> None:
    assert interfaces.matches(pattern, name) is fits
