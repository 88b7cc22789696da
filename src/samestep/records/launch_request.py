"""LaunchRequest: what a command trains, by which ranks, machines and checkpoints are compared."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchRequest:
    """What a command trains, and with which code. It is equal on all machines of one training."""

    job: str
    """Name of the job's file, and of the function in it."""

    source: str
    """Digest of the job's file and of the modules beside it."""

    settings: str
    """Settings of --set as typed, without secrets."""

    engine: str
    """Name of the engine of --engine; of several, their names with commas between them."""

    engine_settings: str
    """Settings of --set-engine as typed, without secrets."""

    training: str
    """Options that decide what is trained or evaluated, without those at their defaults, as 'every=2 patience=3'; of a
    continued training 'continued' and the value of its option. '': the command does neither."""

    samestep: str
    """Version of samestep, and a digest of its files."""

    torch: str
    """Version of torch."""

    mesh: str = ""
    """Mesh of --mesh. '': no mesh was given."""

    def difference(self, request: LaunchRequest, among: Collection[str] = ()) -> tuple[str, str, str] | None:
        """Returns the first thing in which `request` differs: its name, this one's value and the other's; or None.

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
