"""What each probe finds in facts as machines have given them, good and bad; and that every probe is declared whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, get_args, get_type_hints

import pytest

from doctor.probes.row import Row
from doctor.probes.rows import environment, gpu, host, launch, network
from samestep.doctor import probes
from samestep.doctor.machine import LaunchInfo
from samestep.doctor.probe import GROUPS, FleetProbe, MachineProbe, for_each, ok
from samestep.doctor.probes import PROBES, collective, installation, interfaces
from samestep.doctor.records import Answer, Greeting, ProbeQuestion, Request
from samestep.message import Message, message
from samestep.records.files import as_json, from_json

ROWS: list[Row] = [*launch.ROWS, *host.ROWS, *environment.ROWS, *gpu.ROWS, *network.ROWS]


@pytest.mark.parametrize(("name", "facts", "status", "identity", "fields", "fix"), ROWS)
def test_a_probe_finds(name: str, facts: Any, status: str, identity: str, fields: Mapping[str, Any], fix: str) -> None:
    """The facts have been through JSON, as those of another machine."""
    probe = PROBES[name]
    if isinstance(probe, FleetProbe):
        findings = probe.judge(from_json(probe.facts, as_json(facts)))
    else:
        by_machine: Mapping[str, Any] = facts if isinstance(facts, dict) else {"h0": facts}
        findings = probe.judge(
            {machine: from_json(probe.facts, as_json(gathered)) for machine, gathered in by_machine.items()}
        )
    worst = max(findings, key=lambda finding: ("OK", "UNKNOWN", "WARN", "FAIL").index(finding.status))
    assert (worst.status, worst.why.id) == (status, identity), findings
    for field, value in fields.items():
        assert worst.why.fields[field] == (pytest.approx(value) if isinstance(value, float) else value)
    assert fix in worst.fix and bool(worst.fix) == (status in ("WARN", "FAIL")), worst


def test_every_probe_is_judged_well_and_badly() -> None:
    for name in PROBES:
        statuses = {row[2] for row in ROWS if row[0] == name}
        assert "OK" in statuses and statuses & {"WARN", "FAIL"}, name


def test_every_probe_is_declared_once_and_listed() -> None:
    modules = [import_module(f"samestep.doctor.probes.{module.name}") for module in iter_modules(probes.__path__)]
    declared = [probe for module in modules for probe in module.PROBES]
    assert len(declared) == len(PROBES) == len({id(probe) for probe in declared})
    assert all(PROBES[probe.name] is probe and probe.group in GROUPS for probe in declared)


WHOLE: dict[str, Any] = {
    "name": "ranks",
    "group": "host",
    "facts": int,
    "gather": lambda info: info.nproc,
    "judge": for_each(lambda ranks: ok(message("port_is_free", port=ranks))),
}


def test_a_member_of_a_probe_that_is_misspelt_or_missing_is_an_error() -> None:
    complete = MachineProbe(**WHOLE)
    (finding,) = complete.judge({"h0": complete.gather(LaunchInfo(nproc=3))})
    assert (finding.machine, finding.why.fields) == ("h0", {"port": 3})
    for name, value in [*WHOLE.items(), ("in_worker", True)]:
        remaining = {member: inner for member, inner in WHOLE.items() if member != name}
        with pytest.raises(TypeError):
            MachineProbe(**remaining, **{f"{name}s": value})
        with pytest.raises(TypeError):
            FleetProbe(**remaining, **{f"{name}s": value})


def types_in(kind: Any) -> Iterator[type]:
    """The types of the fields of a record, of their fields, and so on."""
    if is_dataclass(kind) and isinstance(kind, type):
        yield kind
        for hint in get_type_hints(kind).values():
            yield from types_in(hint)
    else:
        for argument in get_args(kind):
            yield from types_in(argument)


@pytest.mark.parametrize(
    "kind", [Greeting, Request, Answer, ProbeQuestion, *(probe.facts for probe in PROBES.values())]
)
def test_no_message_crosses_the_network(kind: type) -> None:
    """What another machine says is facts; the first one makes the findings of them, so no id comes from elsewhere."""
    assert Message not in {*types_in(kind)} and fields_of(kind)


@pytest.mark.parametrize(
    ("backend", "machines", "expected"),
    [
        ("gloo", 1, [{"GLOO_SOCKET_IFNAME": "eth0"}, {"GLOO_SOCKET_IFNAME": "lo"}]),
        ("gloo", 2, [{"GLOO_SOCKET_IFNAME": "eth0"}]),
    ],
)
def test_the_settings_that_are_tried(backend: str, machines: int, expected: list[dict[str, str]]) -> None:
    assert collective.candidates(["eth0", "lo"], backend, machines) == expected
    with_gpus = collective.candidates(["eth0", "lo"], "nccl", machines)
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


def test_what_the_engines_need_is_read_without_importing_them() -> None:
    needed = installation.needs(installation.PACKAGE / "engines")
    assert {"accelerate", "deepspeed", "horovod", "lightning", "ray", "transformers"} <= set(needed)
