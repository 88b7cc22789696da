"""World: where this process stands among the others. A plain value, read from the launcher's environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from samestep.errors import UserError


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
        """Reads what torchrun sets, and SAMESTEP_DEVICES: the devices of this machine, one for each local rank.

        A process that is alone drives all of them (DataParallel does; other engines take the first).
        """
        devices = tuple(env.get("SAMESTEP_DEVICES", "cpu").split(","))
        size = int(env.get("WORLD_SIZE", "1"))
        local_rank = int(env.get("LOCAL_RANK", "0"))
        if local_rank >= len(devices) and devices != ("cpu",):
            raise UserError(
                f"local rank {local_rank} has no device: only {', '.join(devices)} here; "
                f"start at most {len(devices)} ranks on this machine (--nproc {len(devices)})"
            )
        mine = devices if size == 1 else (devices[local_rank % len(devices)],)
        return cls(
            rank=int(env.get("RANK", "0")),
            size=size,
            local_rank=local_rank,
            local_size=int(env.get("LOCAL_WORLD_SIZE", "1")),
            node=int(env.get("GROUP_RANK", "0")),
            devices=mine,
        )
