"""Evaluation inside a training leaves no trace: the mode, the random stream and the buffers are as they were."""

from __future__ import annotations

import pytest
import torch

from samestep.evaluate import evaluate
from samestep.loading import build
from samestep.world import World


@pytest.mark.parametrize("training", [True, False])
def test_it_leaves_mode_random_stream_and_buffers_as_they_were(training: bool) -> None:
    job = build("digits", {})
    model = job.model().train(training)
    frozen = model[0].eval()  # a part that its owner keeps in evaluation mode
    torch.manual_seed(5)
    before = torch.get_rng_state(), {name: buffer.clone() for name, buffer in model.named_buffers()}
    evaluate(job, model, World())
    assert model.training is training
    assert not frozen.training
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(torch.equal(buffer, before[1][name]) for name, buffer in model.named_buffers())
