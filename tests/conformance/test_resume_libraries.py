"""Libraries' engines continue their own trainings to the bit, and one another's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.test_resume import distance, train
from ranks import Ranks, skip_unless_here

CASES = [
    ("accelerate", {}),
    ("amp", {"precision": "bf16"}),
    ("amp", {"precision": "fp16"}),
    ("fabric", {}),
    ("fabric", {"strategy": "model_parallel"}),
    ("lightning", {}),
    ("lightning", {"strategy": "model_parallel"}),
    ("hf", {}),
    ("fairscale", {}),
    ("ray", {}),
    ("horovod", {}),
    ("deepspeed", {"stage": 1}),
    ("deepspeed", {"stage": 2}),
    ("deepspeed", {"stage": 3}),
]


@pytest.mark.check
@pytest.mark.parametrize(("engine", "settings"), CASES)
def test_a_librarys_training_continues(
    engine: str, settings: dict[str, object], ranks: Callable[..., Ranks], tmp_path: Path
) -> None:
    skip_unless_here(engine)
    kind = "narrow" if settings == {"stage": 3} else "alike"
    own = ranks(2, engine)
    for optimizer in ("adam", "sgd"):
        job, whole, cut = f"{kind} {optimizer}", tmp_path / f"whole {optimizer}", tmp_path / f"cut {optimizer}"
        train(own, job, engine, whole, settings=settings)
        for stop in (2, 6):
            train(own, job, engine, cut, settings=settings, stop_after=stop)
        seen = train(own, job, engine, cut, settings=settings)[0]
        assert seen.resumed_from == 6
        assert distance(whole, cut) == 0.0


@pytest.mark.check
def test_deepspeed_and_ddp_continue_one_another(tmp_path: Path) -> None:
    """At the precision of DeepSpeed's float32 weights. DDP's own two steps are in float32 too."""
    skip_unless_here("deepspeed")
    with Ranks(2, engine="deepspeed") as own:
        train(own, "narrow", "ddp", tmp_path / "whole")
        for stop, (engine, stage) in enumerate(
            (("ddp", 0), ("deepspeed", 1), ("deepspeed", 3), ("fsdp", 0), ("deepspeed", 2))
        ):
            settings = {"stage": stage} if stage else {}
            last = {"stop_after": 2 * stop + 2} if stop < 4 else {}
            train(own, "narrow", engine, tmp_path / "relay", settings=settings, **last)
    assert distance(tmp_path / "whole", tmp_path / "relay") < 1e-6
