"""Errors of an engine that are refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from samestep.engine import Checks
from samestep.errors import Refused
from samestep.rank.step import explain_dtypes
from samestep.tasks.run_engine import run_engine
from samestep.world import World

SAID = "FSDP expects uniform original parameter dtype but got {torch.float32, torch.bfloat16}"


@pytest.mark.parametrize(("said", "refused"), [(SAID, True), ("assert len(rows) > 0", False)])
def test_fsdp_of_several_dtypes_is_a_refusal(said: str, refused: bool) -> None:
    def train(*_: Any) -> None:
        raise AssertionError(said)

    engine: Any = SimpleNamespace(train=train, fragments=None, checks=Checks(explain=explain_dtypes))
    job: Any = SimpleNamespace(
        sync_batchnorm=False, model=lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    )
    with pytest.raises(Refused if refused else AssertionError) as raised:
        run_engine(engine, job, World(), SimpleNamespace(), {})  # type: ignore[arg-type]
    if isinstance(raised.value, Refused):
        assert raised.value.message.id == "fsdp_shards_one_dtype_together"
        assert raised.value.message.fields["dtypes"] == ["bfloat16", "float32"]
