"""Every NCCL_*, GLOO_* and TORCH_* variable that is set: what it means, whether it helps here, and names that no
library reads."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from samestep.world import nvidia
from samestep.world.checks import Finding, LaunchInfo, different, on_each, warn
from samestep.world.known_variables import KNOWN, PREFIXES, Known

GROUP = "variables"
FREE_CASE = ("NCCL_DEBUG", "GLOO_LOG_LEVEL")  # read in either case


@dataclass(frozen=True)
class Facts:
    """The variables of NCCL, gloo and torch, on one machine.

    values: of the variables that are set. gpus, infiniband: whether this machine has any.
    """

    values: Mapping[str, str] = field(default_factory=dict)
    gpus: bool = False
    infiniband: bool = False
    nnodes: int = 1


def probe(info: LaunchInfo) -> Facts:
    values = {name: os.environ[name] for name in sorted(os.environ) if name.upper().startswith(PREFIXES)}
    gpus = nvidia.DRIVER.exists()
    return Facts(values, gpus, Path("/sys/class/infiniband").is_dir(), info.nnodes)


def judge(facts: Mapping[str, Facts]) -> list[Finding]:
    findings = on_each(facts, lambda seen: [each for name in seen.values for each in _judge(name, seen)])
    names = sorted({name for seen in facts.values() for name in seen.values if name in KNOWN})
    for name in names:
        if says := different(facts, lambda seen: seen.values.get(name, "(not set)")):  # noqa: B023 - called at once
            if name.endswith(("_IFNAME", "_FILE")):
                continue  # interfaces may have other names on each machine
            value = next(seen.values[name] for seen in facts.values() if name in seen.values)
            findings += warn(
                f"{name} is not the same on all machines ({says})", f"export {name}={shlex.quote(value)}   # on each"
            )
    return findings or [Finding("OK", "no variable of NCCL, gloo or torch is set")]


def _judge(name: str, seen: Facts) -> Iterator[Finding]:
    value = seen.values[name]
    known = KNOWN.get(name)
    if known is None:
        yield _unknown(name, value)
        return
    shown = f"{name}={value}: {known.meaning}"
    absent = _absent(known, seen)
    plain = value.strip().strip("'\"")
    if not value and name.startswith("NCCL_"):
        yield Finding("OK", f"{name} is empty, which NCCL ignores")
    elif plain != value:
        yield Finding(
            "WARN", f"{name}={value!r} has spaces or quotes in its value", f"export {name}={shlex.quote(plain)}"
        )
    elif known.instead:
        yield Finding(
            "WARN",
            f"{name} is now {known.instead}, and may be ignored",
            _renamed(name, known.instead, value),
        )
    elif known.values and (value.upper() if name in FREE_CASE else value) not in known.values:
        status = "FAIL" if name in ("TORCH_DISTRIBUTED_DEBUG", "GLOO_DEVICE_TRANSPORT") else "WARN"
        takes = f"{name}={value}: it takes {', '.join(known.values)}"
        yield Finding("FAIL" if status == "FAIL" else "WARN", takes, f"unset {name}")
    elif absent:
        yield Finding("OK", f"{shown}; no effect here, without {absent}")
    elif value in known.slows:
        yield Finding("WARN", f"{shown}; it slows the training: {known.why}", f"unset {name}")
    else:
        yield Finding("OK", shown)


def _absent(known: Known, seen: Facts) -> str:
    """Returns what is not here that a variable needs to have an effect."""
    if known.needs in ("gpu", "infiniband") and not seen.gpus:
        return "an NVIDIA GPU"
    if known.needs == "infiniband" and not seen.infiniband:
        return "InfiniBand"
    return "other machines" if known.needs == "several" and seen.nnodes == 1 else ""


def _unknown(name: str, value: str) -> Finding:
    if name.upper() in KNOWN:
        return Finding(
            "WARN", f"{name} is not a known variable: its name is {name.upper()}", _renamed(name, name.upper(), value)
        )
    near = get_close_matches(name.upper(), list(KNOWN), n=1, cutoff=0.85)
    if near:
        said = f"{name} is not a known variable; did you mean {near[0]}?"
        return Finding("WARN", said, _renamed(name, near[0], value))
    return Finding("UNKNOWN", f"{name}={value}: samestep knows no variable of this name")


def _renamed(name: str, right: str, value: str) -> str:
    return f"unset {name}; export {right}={shlex.quote(value)}"
