"""What a model keeps besides its weights is put back after a forward pass that must leave nothing behind."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from samestep.rank.step import keep_state


class Keeping(nn.Module):
    load: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.of_kind, self.hidden = 0, {"all": 0}, torch.zeros(2)
        self.history: list[int] = []
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("load", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(self.calls)
        self.of_kind["all"] += 1
        self.hidden, self.load = x[0].detach(), self.load + 1
        self.latest = float(x.mean())
        return self.norm(x)  # type: ignore[no-any-return]


def test_counts_containers_and_buffers_are_put_back() -> None:
    model = Keeping()
    model(torch.randn(3, 2))
    history, load, hidden, mean = model.history, model.load, model.hidden, model.norm.running_mean
    assert mean is not None
    means = mean.clone()
    restore = keep_state(model)
    model(torch.randn(3, 2))
    restore()
    assert (model.calls, model.history, model.of_kind) == (1, [1], {"all": 1})
    assert model.history is history and model.hidden is hidden and model.load is load
    assert load.tolist() == [1, 1] and model.norm.running_mean is mean and torch.equal(mean, means)


def test_what_a_pass_adds_is_taken_away() -> None:
    model = Keeping()
    restore = keep_state(model)
    model(torch.randn(3, 2))
    restore()
    assert not hasattr(model, "latest") and model.calls == 0 and not model.history
