"""World: where this process stands among the others. A plain value, read from the launcher's environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.errors import UserError

STARTED_BY = "SAMESTEP_STARTED_BY"  # the environment's name for whose variables to read
LAUNCHERS = {  # rank, world size, local rank, local world size, node: what each launcher calls them
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    "horovodrun": (
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        "HOROVOD_CROSS_RANK",
    ),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_NODE_RANK",
    ),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"),
}


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
        """Reads what the launcher in SAMESTEP_STARTED_BY sets (torchrun where none is named), and SAMESTEP_DEVICES:
        the devices here, one for each local rank.

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
    rank, size, local_rank, local_size, node = LAUNCHERS[env.get(STARTED_BY, "torchrun")]
    number = int(env.get(node, "0"))
    return (
        int(env.get(rank, "0")),
        int(env.get(size, "1")),
        int(env.get(local_rank, "0")),
        tasks_per_node(env.get(local_size, "1"), number),
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
