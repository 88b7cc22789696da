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


def advice(settings: Mapping[str, str], chosen: Mapping[str, str]) -> str | None:
    """A word to who changes the global batch and not the learning rate; None where there is nothing to say.

    settings: name -> 'type = default', as the inspection tells; chosen: those given. The rule is of SGD: P. Goyal et
    al., "Accurate, Large Minibatch SGD", 2017 (arXiv:1706.02677).
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
    return (
        f"global_batch is {factor:g} × the job's own {usual:g}, and lr its own {rate:g}; with SGD, linear scaling "
        f"would take {rate:g} × {factor:g} (--set lr={rate * factor:g}), after some epochs of warm-up"
    )
