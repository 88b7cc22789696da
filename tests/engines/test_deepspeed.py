"""Engine deepspeed in bfloat16: the weights that are saved are those that the optimizer steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import nn

from command import TESTS
from ranks import Ranks
from samestep.engines.deepspeed import check
from samestep.errors import UserError
from samestep.records.plan import Plan, RunTask

HEADS = f"{TESTS}/mutations/jobs.py:heads"


@pytest.mark.check
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_saved_weights_are_not_rounded_to_bfloat16(stage: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    weights = tmp_path / "weights.safetensors"
    settings = {"stage": stage, "precision": "bf16"}
    with Ranks(2, engine="deepspeed") as ranks:
        ranks.work(Plan("", 0.0, HEADS, {}, "deepspeed", settings, trainings=(RunTask(str(weights), stop_after=3),)))
    trained = [tensor for tensor in load_file(weights).values() if tensor.numel() > 16]
    assert trained
    for tensor in trained:
        exact = tensor.float()
        assert (exact.bfloat16().float() != exact).float().mean() > 0.5


def test_batchnorm_in_bfloat16_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    check(model, stage=2)
    with pytest.raises(UserError) as refused:
        check(model, stage=2, precision="bf16")
    assert refused.value.message.id == "deepspeed_bf16_and_batchnorm"
    check(nn.Linear(2, 2), precision="bf16")
