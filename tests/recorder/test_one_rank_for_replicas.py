"""The only rank of a replay stands for all replicas: what a script is told of its groups, and where that ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as with_gradient
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import SGD, optimizer

from samestep.message import Message
from samestep.rank.hooks import Hooks
from samestep.recorder.one_rank import GatheredWithHistory, make_meshes_of_one_rank
from samestep.recorder.one_rank_for_replicas import OneRankForReplicas

REPLICAS = [[0, 1], [2, 3]]


class Stopped(Exception):
    def __init__(self, why: Message) -> None:
        self.why = why


def stop(why: Message) -> NoReturn:
    raise Stopped(why)


@pytest.fixture
def alike(hooks: Hooks, monkeypatch: pytest.MonkeyPatch) -> Iterator[OneRankForReplicas]:
    """Two replicas of two ranks each, for which this process stands; what it patches is put back."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    of_optimizers = dict(optimizer._global_optimizer_post_hooks)
    replicas = OneRankForReplicas(REPLICAS, stop)
    make_meshes_of_one_rank(hooks, replicas.refuse_mesh)
    replicas.attach(hooks)
    GatheredWithHistory().attach(hooks)
    try:
        yield replicas
    finally:
        optimizer._global_optimizer_post_hooks.clear()
        optimizer._global_optimizer_post_hooks.update(of_optimizers)
        dist.destroy_process_group()


def test_each_way_to_ask_a_group_for_its_size_has_one_answer(alike: OneRankForReplicas) -> None:
    along_data, replica, every = dist.new_group([0, 2]), dist.new_group([0, 1]), dist.new_group()
    for group, ranks in [(along_data, [0, 2]), (every, [0, 1, 2, 3]), (dist.group.WORLD, [0, 1, 2, 3]), (replica, [0])]:
        assert (dist.get_world_size(group), group.size()) == (len(ranks), len(ranks))
        assert dist.get_process_group_ranks(group) == ranks
    assert dist.get_world_size() == 4 and dist.distributed_c10d._get_group_size(along_data) == 1  # torch's own


def test_a_sum_over_replicas_is_a_multiple_with_a_gradient_or_without(alike: OneRankForReplicas) -> None:
    along_data, replica = dist.new_group([0, 2]), dist.new_group([0, 1])
    plain = torch.ones(3)
    dist.all_reduce(plain, group=along_data)
    assert plain.tolist() == [2.0] * 3
    for group, factor in ((along_data, 2.0), (replica, 1.0)):
        weight = torch.ones(3, requires_grad=True)
        total = with_gradient.all_reduce(weight * 1.0, group=group)
        total.sum().backward()
        assert weight.grad is not None
        assert total.tolist() == weight.grad.tolist() == [factor] * 3


def test_a_number_is_gathered_as_all_replicas_have_it(alike: OneRankForReplicas) -> None:
    along_data, loss = dist.new_group([0, 2]), torch.tensor([1.5], requires_grad=True)
    parts = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(parts, loss * 2, group=along_data)
    assert [part.numpy().tolist() for part in parts] == [[3.0], [3.0]]
    counts = torch.zeros(4, dtype=torch.long)
    dist.all_gather_into_tensor(counts, torch.tensor([7]))
    assert counts.tolist() == [7] * 4


ENDS: dict[str, Callable[[Any], Any]] = {
    "all_gather": lambda group: dist.all_gather([torch.zeros(2), torch.zeros(2)], torch.ones(2), group=group),
    "all_to_all_single": lambda group: dist.all_to_all_single(torch.zeros(2).long(), torch.ones(2).long(), group=group),
    "all_gather_object": lambda group: dist.all_gather_object([None, None], 1, group=group),
    "all_reduce": lambda group: functional.all_reduce(torch.ones(2), "sum", group),
    "named": lambda group: functional.all_reduce(torch.ones(2), "sum", group.group_name),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_one_rank_cannot_stand_for_ends_the_replay(name: str, alike: OneRankForReplicas) -> None:
    with pytest.raises(Stopped) as stopped:
        ENDS[name](dist.new_group([0, 2]))
    exchanged = name in ("all_gather", "all_to_all_single")
    assert stopped.value.why.id == ("replicas_exchange" if exchanged else "replica_stands_not_for_all")


def test_what_a_replica_has_for_itself_goes_on(alike: OneRankForReplicas) -> None:
    replica, objects = dist.new_group([0, 1]), [None]
    assert functional.all_reduce(torch.ones(2), "sum", replica).tolist() == [1.0, 1.0]
    dist.all_gather_object(objects, 1, group=replica)
    assert objects == [1]
    assert DeviceMesh("cpu", [0, 1]).size() == 1


@pytest.mark.parametrize(
    "make", [lambda: dist.init_device_mesh("cpu", (2, 2)), lambda: DeviceMesh("cpu", [[0, 1], [2, 3]])]
)
def test_a_mesh_of_several_replicas_ends_the_replay(make: Callable[[], DeviceMesh], alike: OneRankForReplicas) -> None:
    with pytest.raises(Stopped) as stopped:
        make()
    assert stopped.value.why.fields == {"operation": "DeviceMesh"}


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_only_a_number_between_a_backward_pass_and_its_step_may_clip(when: str, alike: OneRankForReplicas) -> None:
    model = nn.Linear(2, 1)
    steps = SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(torch.ones(1, 2)).sum()
        if when == "before":
            dist.all_reduce(loss.detach())
        loss.backward()
        if when == "between":
            dist.all_reduce(loss.detach())
        steps.step()
        if when == "after":
            dist.all_reduce(loss.detach())
    assert alike.adds_numbers == (when == "between")
