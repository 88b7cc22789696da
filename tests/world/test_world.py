"""World.from_env is pure: what a launcher's environment means."""

from __future__ import annotations

import pytest

from samestep.errors import UserError
from samestep.message import message
from samestep.world import World


def test_alone() -> None:
    assert World.from_env({}) == World()


def test_as_torchrun_says() -> None:
    env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    world = World.from_env(env | {"SAMESTEP_DEVICES": "cuda:0,cuda:1"})
    assert world == World(rank=3, size=4, local_rank=1, local_size=2, node=1, devices=("cuda:1",))
    assert (world.device, world.backend) == ("cuda:1", "nccl")


def test_one_process_drives_all_devices() -> None:
    assert World.from_env({"SAMESTEP_DEVICES": "cuda:0,cuda:1"}).devices == ("cuda:0", "cuda:1")


def test_ranks_share_the_cpu() -> None:
    assert World.from_env({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}).device == "cpu"


def test_a_rank_without_a_device() -> None:
    with pytest.raises(UserError) as raised:
        World.from_env({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "SAMESTEP_DEVICES": "cuda:0"})
    assert raised.value.message == message("rank_has_no_device", local_rank=1, devices=["cuda:0"], count=1)
