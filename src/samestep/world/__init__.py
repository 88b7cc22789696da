"""World: this process's rank, world size and devices, read from the launcher's environment variables."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from samestep.errors import UserError
from samestep.message import message
from samestep.world.mesh import Mesh

RANK_VARIABLES = "SAMESTEP_RANK_VARIABLES"  # environment variable: the five names below, unless they are torchrun's
RENDEZVOUS_PORT = 29500  # torch.distributed's default


class RankVariables(NamedTuple):
    """The names of a launcher's environment variables. The defaults are torchrun's."""

    rank: str = "RANK"
    """The variable that holds the rank."""

    size: str = "WORLD_SIZE"
    """The variable that holds the world size."""

    local_rank: str = "LOCAL_RANK"
    """The variable that holds the local rank."""

    local_size: str = "LOCAL_WORLD_SIZE"
    """The variable that holds the local world size."""

    node: str = "GROUP_RANK"
    """The variable that holds the node rank."""

    def environment(self) -> dict[str, str]:
        """Returns the variable that makes World.from_env read these names."""
        return {RANK_VARIABLES: ",".join(self)}


@dataclass(frozen=True)
class World:
    """This process's place in the process group."""

    rank: int = 0
    """The rank of this process, of `size` ranks."""

    size: int = 1
    """The number of ranks."""

    local_rank: int = 0
    """The rank of this process among the ranks on this machine."""

    local_size: int = 1
    """The number of ranks on this machine."""

    node: int = 0
    """The node rank of this machine."""

    devices: tuple[str, ...] = ("cpu",)
    """The torch devices of this process. All engines but DataParallel use one, `device`."""

    mesh: Mesh | None = None
    """How the ranks are arranged. None: each is a replica."""

    @property
    def replicas(self) -> int:
        """The number of replicas that have a process each, or several: they train on different rows."""
        return self.mesh.replicas if self.mesh else self.size

    @property
    def replica(self) -> int:
        """The number of the replica that this rank belongs to."""
        return self.mesh.replica(self.rank) if self.mesh else self.rank

    @property
    def part(self) -> int:
        """This rank's number among those of its replica."""
        return sum(self.mesh.replica(rank) == self.replica for rank in range(self.rank)) if self.mesh else 0

    @property
    def begins_replica(self) -> bool:
        """Whether this rank is the first of its replica's."""
        return self.part == 0

    def begins_copies(self, divided: Collection[str]) -> bool:
        """Returns whether this rank is the first of those that have the same part of what some axes of the mesh
        divide."""
        places = self.mesh.coordinates(self.rank) if self.mesh else {"data": self.rank}
        return not any(place for axis, place in places.items() if axis not in divided)

    @property
    def device(self) -> str:
        """The torch device that all engines but DataParallel use."""
        return self.devices[0]

    @property
    def backend(self) -> str:
        """The backend of torch.distributed: 'nccl' or 'gloo'."""
        return "nccl" if self.device.startswith("cuda") else "gloo"

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> World:
        """Reads the variables that SAMESTEP_RANK_VARIABLES names (torchrun's where it is not set).

        SAMESTEP_DEVICES holds this machine's devices, one for each local rank. With a world size of 1 the process gets
        all of them (DataParallel uses all, other engines the first). Raises UserError for a rank without a device.
        """
        rank, size, local_rank, local_size, node = places(env)
        devices = tuple(env.get("SAMESTEP_DEVICES", "cpu").split(","))
        if local_rank >= len(devices) and devices != ("cpu",):
            fields = {"local_rank": local_rank, "devices": devices, "count": len(devices)}
            raise UserError(message("rank_has_no_device", **fields))
        assigned = devices if size == 1 else (devices[local_rank % len(devices)],)
        return cls(rank, size, local_rank, local_size, node, assigned)


def places(env: Mapping[str, str]) -> tuple[int, int, int, int, int]:
    """Returns rank, world size, local rank, local world size and node rank; those of a single process where unset."""
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
    """Returns the tasks of node `node` by Slurm's '2(x3),1' (three nodes of two tasks, one of one), or by a number.

    Raises ValueError for other texts.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"{text!r} is no list of tasks per node")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[min(node, len(counts) - 1)]
