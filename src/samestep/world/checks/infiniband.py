"""The state of InfiniBand and RoCE adapters, as the kernel reports it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from samestep.world.checks import Finding, LaunchInfo, ok, on_each, warn

GROUP = "network"
CLASS = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Port:
    """A port of an InfiniBand or RoCE adapter.

    adapter: its name. number: of the port. state, physical: as in '4: ACTIVE', '5: LinkUp'. rate: as in '200 Gb/sec (4X
    HDR)'.
    """

    adapter: str
    number: str
    state: str
    physical: str
    rate: str
    layer: str


@dataclass(frozen=True)
class Facts:
    ports: tuple[Port, ...]


def probe(info: LaunchInfo) -> Facts:
    folders = sorted(CLASS.glob("*/ports/*"))
    return Facts(tuple(_port(folder) for folder in folders))


def _port(folder: Path) -> Port:
    texts = []
    for name in ("state", "phys_state", "rate", "link_layer"):
        text = ""
        with suppress(OSError):
            text = (folder / name).read_text().strip()
        texts.append(text)
    return Port(folder.parents[1].name, folder.name, texts[0], texts[1], texts[2], texts[3])


def judge(facts: Mapping[str, Facts]) -> list[Finding]:
    return on_each(facts, _judge)


def _judge(seen: Facts) -> list[Finding]:
    active = [port for port in seen.ports if "ACTIVE" in port.state]
    findings = []
    for port in seen.ports:
        if port not in active:
            rest = f"NCCL_IB_HCA=^{port.adapter}" if active else "NCCL_IB_DISABLE=1"
            findings += warn(
                f"port {port.number} of {port.adapter} is not active (state {port.state or 'unknown'}, physical state "
                f"{port.physical or 'unknown'})",
                f"export {rest}   # until it is: see ibstat, the cable, and the subnet manager (opensm)",
            )
    if findings:
        return findings
    shown = ", ".join(f"{port.adapter} port {port.number} {port.rate}" for port in active)
    return ok(shown or "no InfiniBand here")
