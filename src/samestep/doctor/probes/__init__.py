"""The doctor's probes, in the order of their groups: what it looks at on each machine, and between them."""

from __future__ import annotations

from collections.abc import Mapping

from samestep.doctor.probe import GROUPS, Probe
from samestep.doctor.probes import collective, gpus, host, installation, interfaces, launch, limits, links, variables

MODULES = (launch, limits, host, installation, variables, gpus, interfaces, links, collective)
ALL: tuple[Probe, ...] = tuple(probe for module in MODULES for probe in module.PROBES)
PROBES: Mapping[str, Probe] = {
    probe.name: probe for probe in sorted(ALL, key=lambda probe: (GROUPS.index(probe.group), probe.name))
}
