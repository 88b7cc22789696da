"""The probe of every NCCL_*, GLOO_* and TORCH_* variable that is set: whether it helps here, and misspelt names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Literal

from samestep.doctor.machine import LaunchInfo
from samestep.doctor.probe import Finding, MachineProbe, differences, fail, for_each, ok, quoted, unknown, warn
from samestep.message import Message, message
from samestep.records.toml_files import read_toml
from samestep.world import nvidia

Needs = Literal["", "gpu", "infiniband"]
PREFIXES = ("NCCL_", "GLOO_", "TORCH_")
TABLE = Path(__file__).parents[1] / "variables.toml"


@dataclass(frozen=True)
class Known:
    """An environment variable that NCCL, gloo or torch reads, as variables.toml says it. cost: the id of why the values
    of `slows` cost speed. en, zh: its meaning, which is a sentence with the variable's name as id."""

    needs: Needs = ""
    values: Sequence[str] = ()
    slows: Sequence[str] = ()
    cost: str = ""
    instead: str = ""
    en: str = ""
    zh: str = ""


@cache
def known_variables() -> Mapping[str, Known]:
    """Returns name -> what is known of the variable."""
    return {name: Known(**facts) for name, facts in read_toml(TABLE).items()}


FREE_CASE = ("NCCL_DEBUG", "GLOO_LOG_LEVEL")  # read in either case
STRICT = ("TORCH_DISTRIBUTED_DEBUG", "GLOO_DEVICE_TRANSPORT")  # another value is an error
ABSENT = "(not set)"


@dataclass(frozen=True)
class Variables:
    """The variables of NCCL, gloo and torch, on one machine.

    values: of the variables that are set. gpus, infiniband: whether this machine has any.
    """

    values: Mapping[str, str] = field(default_factory=dict)
    gpus: bool = False
    infiniband: bool = False


def read_variables(info: LaunchInfo) -> Variables:
    values = {name: os.environ[name] for name in sorted(os.environ) if name.upper().startswith(PREFIXES)}
    has_infiniband = Path("/sys/class/infiniband").is_dir()
    return Variables(values, gpus=nvidia.DRIVER.exists(), infiniband=has_infiniband)


def judge_variables(facts: Mapping[str, Variables]) -> list[Finding]:
    findings = for_each(_judge_machine)(facts)
    names = sorted({name for machine in facts.values() for name in machine.values if name in known_variables()})
    for name in names:
        if name.endswith(("_IFNAME", "_FILE")):
            continue  # interfaces may have other names on each machine
        if values := differences(facts, lambda machine: machine.values.get(name, ABSENT)):  # noqa: B023 - called at once
            value = next(machine.values[name] for machine in facts.values() if name in machine.values)
            why = message("variable_differs_between_machines", name=name, values=values)
            findings += warn(why, f"export {name}={quoted(value)}   # on each")
    return findings


def _judge_machine(facts: Variables) -> list[Finding]:
    findings = [finding for name, value in facts.values.items() for finding in _judge_variable(name, value, facts)]
    return findings or ok(message("no_variable_is_set"))


def _judge_variable(name: str, value: str, facts: Variables) -> list[Finding]:
    known = known_variables().get(name)
    if known is None:
        return _judge_unknown(name, value)
    plain = value.strip().strip("'\"")
    meaning = Message(name.lower())
    if not value and name.startswith("NCCL_"):
        return ok(message("variable_is_empty", name=name))
    if plain != value:
        return warn(message("variable_has_spaces_or_quotes", name=name, value=value), _export(name, plain))
    if known.instead:
        return warn(
            message("variable_was_renamed", name=name, instead=known.instead), _renamed(name, known.instead, value)
        )
    if known.values and (value.upper() if name in FREE_CASE else value) not in known.values:
        why = message("variable_has_no_such_value", name=name, value=value, values=known.values)
        return (fail if name in STRICT else warn)(why, f"unset {name}")
    if lacking := _lacking(known, facts):
        return ok(message("variable_has_no_effect", name=name, value=value, meaning=meaning, lacking=lacking))
    if value in known.slows:
        why = message("variable_slows_training", name=name, value=value, meaning=meaning, cost=Message(known.cost))
        return warn(why, f"unset {quoted(name)}")
    return ok(message("variable_is_set", name=name, value=value, meaning=meaning))


def _lacking(known: Known, facts: Variables) -> Message | None:
    """Returns what is not here that a variable needs to have an effect."""
    if known.needs in ("gpu", "infiniband") and not facts.gpus:
        return message("an_nvidia_gpu")
    if known.needs == "infiniband" and not facts.infiniband:
        return message("infiniband")
    return None


def _judge_unknown(name: str, value: str) -> list[Finding]:
    if near := get_close_matches(name.upper(), [*known_variables()], n=1, cutoff=0.85):
        return warn(message("variable_is_misspelt", name=name, near=near[0]), _renamed(name, near[0], value))
    return unknown(message("variable_is_unknown", name=name, value=value))


def _export(name: str, value: str) -> str:
    return f"export {name}={quoted(value)}"


def _renamed(name: str, right: str, value: str) -> str:
    return f"unset {quoted(name)}; {_export(right, value)}"


PROBES = (
    MachineProbe(name="variables", group="variables", facts=Variables, gather=read_variables, judge=judge_variables),
)
