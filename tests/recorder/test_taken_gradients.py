"""Gradients that a step has taken and that nothing clears; averages that follow the trained weights, or do not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from samestep.recorder.parameters import TakenGradients
from samestep.recorder.untrained_tensors import Untrained

Clear = Callable[[Tensor], None]


def keep(gradient: Tensor) -> None:
    pass


def decay(gradient: Tensor) -> None:
    gradient.mul_(0.9)


def to_zero(gradient: Tensor) -> None:
    gradient.data.zero_()


@pytest.mark.parametrize(("clear", "uncleared"), [(keep, ["a"]), (decay, []), (to_zero, [])])
def test_a_gradient_that_nothing_has_changed_since_its_step_is_uncleared(clear: Clear, uncleared: list[str]) -> None:
    taken, parameters = TakenGradients(), {"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(2))}

    def backward() -> None:
        taken.begin_backward(parameters)
        (parameters["a"] * parameters["b"]).sum().backward()
        taken.end_backward(parameters)

    backward()
    assert taken.end_step(["a", "b"], parameters) == []
    parameters["b"].grad = None
    assert parameters["a"].grad is not None
    clear(parameters["a"].grad)
    backward()
    backward()  # of the next micro-batch
    assert taken.end_step(["a", "b"], parameters) == uncleared


def test_what_another_loss_adds_may_be_cleared_before_the_optimizers_own() -> None:
    """As a GAN's generator sends its gradient through the discriminator, whose own is cleared before."""
    taken, parameters = TakenGradients(), {"d": nn.Parameter(torch.ones(2)), "g": nn.Parameter(torch.ones(2))}

    def step(name: str, clears: bool) -> list[str]:
        if clears:
            parameters[name].grad = None
        taken.begin_backward(parameters)
        (parameters["d"] * (parameters["g"] if name == "g" else 2.0)).sum().backward()
        taken.end_backward(parameters)
        return taken.end_step([name], parameters)

    assert [step(name, True) for name in "dgdg"] == [[], [], [], []]
    assert step("d", False) == ["d"]


@pytest.mark.parametrize(("share", "follows"), [(1e-4, True), (0.0, False)])
def test_how_far_an_average_follows_is_a_share_of_the_trained_weights_way(share: float, follows: bool) -> None:
    net = nn.Linear(40, 40)
    average = copy.deepcopy(net).requires_grad_(False)
    untrained = Untrained(lambda parameter: parameter.requires_grad)
    untrained.add(average)
    start = {name: untrained.records()[f"Linear: {name}"].start for name, _ in net.named_parameters()}
    with torch.no_grad():
        for _ in range(4):
            for trained, held in zip(net.parameters(), average.parameters()):
                trained.add_(0.05)
                # Without a share it is averaged with itself, which rounds.
                held.copy_(held * (1 - share) + trained * share if share else held * 0.9 + held * 0.1)
    moved = untrained.follows(dict(net.named_parameters()), start)["Linear"]
    assert (moved > 1e-5) is follows


def test_an_average_that_is_written_and_stays_has_been_updated() -> None:
    """Its values tell nothing of that."""
    average = nn.Linear(4, 4).requires_grad_(False)
    untrained = Untrained(lambda parameter: parameter.requires_grad)
    untrained.add(average)
    for writes, updates in ((True, {"Linear": 1}), (False, {})):
        untrained.note_updates()
        untrained.after_step()
        if writes:
            with torch.no_grad():
                average.weight.lerp_(torch.ones(4, 4), 0.0)
        untrained.note_updates()
        assert untrained.after_step() == ({}, updates, [])
