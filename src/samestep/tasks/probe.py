"""Gathers the facts of the doctor's checks that need torch, in a worker."""

from __future__ import annotations

from samestep.records.doctor import Probed, ProbeQuestion, Probes
from samestep.records.files import as_json
from samestep.world import checks


def probes_of(question: ProbeQuestion) -> Probes:
    """Returns the facts of the checks that are asked for, on this machine."""
    return Probes(tuple(probed(name, question) for name in question.checks))


def probed(name: str, question: ProbeQuestion) -> Probed:
    """Returns a check's facts, or the error of its probe, which must not hide the rest."""
    try:
        return Probed(name, as_json(checks.probe(name, question.place)))
    except Exception as error:
        return Probed(name, error=f"{type(error).__name__}: {error}")
