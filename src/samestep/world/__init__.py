"""World: where this process stands among the others. A plain value, read from the launcher's environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from samestep.errors import UserError

RANK_VARIABLES = "SAMESTEP_RANK_VARIABLES"  # the environment's name for the names below, where they are not torchrun's


class RankVariables(NamedTuple):
    """What a launcher calls a rank's number, the world's size, the rank's number on its machine, how many ranks that
    machine has, and the machine's number. The defaults are torchrun's."""

    rank: str = "RANK"
    size: str = "WORLD_SIZE"
    local_rank: str = "LOCAL_RANK"
    local_size: str = "LOCAL_WORLD_SIZE"
    node: str = "GROUP_RANK"

    def environment(self) -> dict[str, str]:
        """The environment that has World.from_env read these."""
        return {RANK_VARIABLES: ",".join(self)}


@dataclass(frozen=True)
class World:
    """rank: this process among `size`; local_rank: among the `local_size` on this machine, which is number `node`.

    devices: what this process drives, as torch spells it; all engines but DataParallel use one, `device`.
    backend: of torch.distributed, 'nccl' or 'gloo'.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    devices: tuple[str, ...] = ("cpu",)

    @property
    def device(self) -> str:
        return self.devices[0]

    @property
    def backend(self) -> str:
        return "nccl" if self.device.startswith("cuda") else "gloo"

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> World:
        """Reads the variables that SAMESTEP_RANK_VARIABLES names (torchrun's where it is not set).

        SAMESTEP_DEVICES holds the devices here, one for each local rank.

        A process that is alone drives all of them (DataParallel does; other engines take the first).
        """
        rank, size, local_rank, local_size, node = places(env)
        devices = tuple(env.get("SAMESTEP_DEVICES", "cpu").split(","))
        if local_rank >= len(devices) and devices != ("cpu",):
            raise UserError(
                f"local rank {local_rank} has no device: only {', '.join(devices)} here; "
                f"start at most {len(devices)} ranks on this machine (--nproc {len(devices)})"
            )
        mine = devices if size == 1 else (devices[local_rank % len(devices)],)
        return cls(rank, size, local_rank, local_size, node, mine)


def places(env: Mapping[str, str]) -> tuple[int, int, int, int, int]:
    """Rank, world size, local rank, local world size and node, as the launcher tells them; a lone process without."""
    names = RankVariables(*env[RANK_VARIABLES].split(",")) if RANK_VARIABLES in env else RankVariables()
    number = int(env.get(names.node, "0"))
    return (
        int(env.get(names.rank, "0")),
        int(env.get(names.size, "1")),
        int(env.get(names.local_rank, "0")),
        tasks_per_node(env.get(names.local_size, "1"), number),
        number,
    )


def tasks_per_node(text: str, node: int) -> int:
    """Slurm's '2(x3),1' (three nodes of two tasks, one of one) for node number `node`; a plain number as it is.

    Raises ValueError for other texts.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise ValueError(f"{text!r} tells no tasks of machines")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts[min(node, len(counts) - 1)]
