"""How a step's global batch is shared among ranks, and which learning rate goes with another global batch."""

from __future__ import annotations

from collections.abc import Mapping


def one_step(global_batch: int, ranks: int, micro_batches: int = 1) -> str:
    """'4 ranks × 64 = 256 samples a step', with the micro-batches, and with the uneven shares of ranks, if any."""
    share, more = divmod(global_batch, ranks)
    who = "1 rank" if ranks == 1 else f"{ranks} ranks"
    rows = f"{who} × {share}" if not more else f"{more} × {share + 1} + {ranks - more} × {share} on {who}"
    parts = f", in {micro_batches} micro-batches" if micro_batches > 1 else ""
    return f"{rows} = {global_batch} samples a step{parts}"


def advice(settings: Mapping[str, str], chosen: Mapping[str, str], optimizer: str = "SGD") -> str | None:
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
    changed = f"global_batch is {factor:g} × the job's own {default:g}, and lr its own {rate:g}"
    warmup = ", after some epochs of warm-up" if factor > 1 else ""
    if "Adam" in optimizer:
        rule = f"with {optimizer}, scaling by the square root would take {rate:g} × {factor**0.5:.3g}"
        return f"{changed}; {rule} (--set lr={rate * factor**0.5:.3g}){warmup}"
    rule = f"with SGD, linear scaling would take {rate:g} × {factor:g} (--set lr={rate * factor:g})"
    return f"{changed}; {rule}{warmup}"
