"""How a step's global batch is shared among ranks, and which learning rate goes with another global batch."""

from __future__ import annotations

from collections.abc import Mapping

from samestep.message import Message, message


def one_step(global_batch: int, ranks: int, micro_batches: int = 1) -> Message:
    """'4 ranks × 64 = 256 samples a step', with the micro-batches, and with the uneven shares of ranks, if any."""
    share, more = divmod(global_batch, ranks)
    shares = message("ranks_share_evenly", ranks=ranks, share=share)
    if more:
        fewer = ranks - more
        shares = message("ranks_share_unevenly", ranks=ranks, more=more, larger=share + 1, fewer=fewer, share=share)
    several = micro_batches if micro_batches > 1 else None
    return message("rows_of_a_step", shares=shares, rows=global_batch, micro_batches=several)


def advice(settings: Mapping[str, str], chosen: Mapping[str, str], optimizer: str = "SGD") -> Message | None:
    """The learning rate to try, where the user has changed global_batch and not lr; None otherwise.

    settings: name -> 'type = default', from the inspection. chosen: those that the user has set. The rule for SGD:
    P. Goyal et al., "Accurate, Large Minibatch SGD", 2017 (arXiv:1706.02677). For Adam and its variants: S. Malladi et
    al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", 2022 (arXiv:2205.10287).
    """
    if "global_batch" not in chosen or "lr" in chosen or "lr" not in settings:
        return None
    try:
        default, rate = (float(settings[name].partition("=")[2]) for name in ("global_batch", "lr"))
        factor = float(chosen["global_batch"]) / default
    except (KeyError, ValueError, ZeroDivisionError):
        return None
    if factor == 1:
        return None
    changed = {"factor": factor, "default": default, "rate": rate}
    warm_up = message("after_some_epochs_of_warm_up") if factor > 1 else None
    if "Adam" in optimizer:
        root = factor**0.5
        scaled = {"root": root, "scaled": rate * root}
        return message("learning_rate_by_square_root", optimizer=optimizer, warm_up=warm_up, **scaled, **changed)
    return message("learning_rate_by_linear_scaling", scaled=rate * factor, warm_up=warm_up, **changed)
