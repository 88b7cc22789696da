"""What one step sees, and the learning rate that goes with another batch. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def one_step(global_batch: int, ranks: int, micro_batches: int = 1) -> str:
    """'4 ranks × 64 = 256 samples a step'; with micro-batches, or rows that ranks cannot share evenly, these too."""
    each, more = divmod(global_batch, ranks)
    who = "1 rank" if ranks == 1 else f"{ranks} ranks"
    rows = f"{who} × {each}" if not more else f"{more} × {each + 1} + {ranks - more} × {each} on {who}"
    parts = f", in {micro_batches} micro-batches" if micro_batches > 1 else ""
    return f"{rows} = {global_batch} samples a step{parts}"


def advice(settings: Mapping[str, str], chosen: Mapping[str, str], optimizer: str = "SGD") -> str | None:
    """A word to who changes the global batch and not the learning rate; None where there is nothing to say.

    settings: name -> 'type = default', as the inspection tells; chosen: those given. The rule for SGD: P. Goyal et al.,
    "Accurate, Large Minibatch SGD", 2017 (arXiv:1706.02677); for Adam and its kin: S. Malladi et al., "On the SDEs and
    Scaling Rules for Adaptive Gradient Algorithms", 2022 (arXiv:2205.10287).
    """
    if "global_batch" not in chosen or "lr" in chosen or "lr" not in settings:
        return None
    try:
        usual, rate = (float(settings[name].partition("=")[2]) for name in ("global_batch", "lr"))
        factor = float(chosen["global_batch"]) / usual
    except (KeyError, ValueError, ZeroDivisionError):
        return None
    if factor == 1:
        return None
    changed = f"global_batch is {factor:g} × the job's own {usual:g}, and lr its own {rate:g}"
    later = ", after some epochs of warm-up" if factor > 1 else ""
    if "Adam" in optimizer:
        rule = f"with {optimizer}, scaling by the square root would take {rate:g} × {factor**0.5:.3g}"
        return f"{changed}; {rule} (--set lr={rate * factor**0.5:.3g}){later}"
    rule = f"with SGD, linear scaling would take {rate:g} × {factor:g} (--set lr={rate * factor:g})"
    return f"{changed}; {rule}{later}"
