"""The error of a BatchNorm layer that gets a single row, as a sentence."""

from __future__ import annotations


def is_one_row_error(error: BaseException) -> bool:
    """Returns whether torch raised `error` because a BatchNorm layer got a single row."""
    return "more than 1 value per channel" in str(error)


def one_row_message(step: int, rank: int) -> str:
    """Returns the message for a BatchNorm layer that would get a single row."""
    return (
        f"step {step}: rank {rank} gets 1 row, BatchNorm needs 2; "
        "set global_batch=… so that every rank gets more, or last=drop"
    )
