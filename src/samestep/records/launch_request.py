"""LaunchRequest: what a command trains, by which ranks, machines and checkpoints are compared."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchRequest:
    """What a command trains, and with which code: equal on all machines of one training.

    job: its function and the name of its file. source: a digest of that file and the modules beside it. settings,
    engine_settings: as typed. training: the options that decide what is trained. samestep, torch: their versions. mesh:
    of --mesh.
    """

    job: str
    source: str
    settings: str
    engine: str
    engine_settings: str
    training: str
    samestep: str
    torch: str
    mesh: str = ""

    def difference(self, request: LaunchRequest, among: Collection[str] = ()) -> tuple[str, str, str] | None:
        """Returns the first thing in which `other` differs: its name, this one's value and the other's; or None.

        among: the fields that count; empty: all of them.
        """
        for name, word in LABELS.items():
            if among and name not in among:
                continue
            own_value, other_value = getattr(self, name), getattr(request, name)
            if own_value != other_value:
                return word, own_value or "none", other_value or "none"
        return None


JOB = ("job", "source", "settings", "training")  # what a checkpoint and the training that continues it share
LABELS = {
    "job": "the job",
    "source": "the job's file, or a module beside it (by digest)",
    "settings": "--set",
    "engine": "--engine",
    "engine_settings": "--set-engine",
    "training": "the options",
    "mesh": "--mesh",
    "samestep": "the version of samestep (and a digest of its files)",
    "torch": "the version of torch",
}
