"""Medians and bootstrap intervals of launches. n counts launches, never steps: steps of one launch share its luck."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

RESAMPLES = 2000


def summary(values: Sequence[float]) -> dict[str, Any]:
    """{median, low, high, n}: the median of `values` and its 95 % bootstrap interval (percentile method).

    With few values the interval cannot reach beyond the smallest and the largest of them.
    Source: B. Efron, R. Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.
    """
    sample = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(0).choice(sample, size=(RESAMPLES, len(sample)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return {"median": float(np.median(sample)), "low": float(low), "high": float(high), "n": len(sample)}


def ratios(over: Sequence[float], under: Sequence[float]) -> dict[str, Any]:
    """The summary of over[i] / under[i]: launches of one round, paired, because the machine drifts between rounds."""
    return summary([a / b for a, b in zip(over, under)])
