"""Which libraries a script trains with, beside those that another library has imported."""

from __future__ import annotations

from samestep.recorder.recorder import libraries_that_train


def test_accelerate_counts_where_an_accelerator_is_made() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    assert "accelerate" not in libraries_that_train()
    Accelerator(cpu=True)
    try:
        assert "accelerate" in libraries_that_train()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
