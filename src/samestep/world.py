"""World: where this process stands among the others. A plain value, read from the launcher's environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from samestep.errors import UserError

HOROVOD = {
    "RANK": "RANK",
    "WORLD_SIZE": "SIZE",
    "LOCAL_RANK": "LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "LOCAL_SIZE",
    "GROUP_RANK": "CROSS_RANK",
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
        """Reads what torchrun or horovodrun sets, and SAMESTEP_DEVICES: the devices here, one for each local rank.

        A process that is alone drives all of them (DataParallel does; other engines take the first).
        """
        devices = tuple(env.get("SAMESTEP_DEVICES", "cpu").split(","))
        if "HOROVOD_RANK" in env:  # horovodrun's names for the same
            pairs = (
                ("RANK", "RANK"),
                ("WORLD_SIZE", "SIZE"),
                ("LOCAL_RANK", "LOCAL_RANK"),
                ("GROUP_RANK", "CROSS_RANK"),
            )
            env = {**env, **{ours: env[f"HOROVOD_{theirs}"] for ours, theirs in pairs}}
            env = {**env, "LOCAL_WORLD_SIZE": env["HOROVOD_LOCAL_SIZE"]}
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
