"""Gathers the facts of the doctor's checks that need torch, in a worker."""

from __future__ import annotations

from samestep.records.doctor import Probed, ProbeQuestion, Probes


def probes_of(question: ProbeQuestion) -> Probes:
    """Returns the facts of the checks that are asked for, on this machine."""
    return Probes(tuple(Probed.of(name, question.info) for name in question.checks))
