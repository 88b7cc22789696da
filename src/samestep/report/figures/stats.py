"""Medians over launches and their bootstrap intervals. n counts launches: steps of one launch are not independent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from samestep.records.results import Summary

RESAMPLES = 2000


def summary(values: Sequence[float]) -> Summary:
    """The median of `values` with its 95 % bootstrap interval (percentile method).

    The interval cannot reach beyond the smallest and the largest value; with five values or fewer it reaches both.
    Source: B. Efron, R. Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.
    """
    sample = np.asarray(values, dtype=np.float64)
    resampled = np.random.default_rng(0).choice(sample, size=(RESAMPLES, len(sample)))
    low, high = np.percentile(np.median(resampled, axis=1), [2.5, 97.5])
    return Summary(median=float(np.median(sample)), low=float(low), high=float(high), n=len(sample))


def ratios(over: Sequence[float], under: Sequence[float]) -> Summary:
    """The summary of over[i] / under[i]. Launches of one round are paired because the machine drifts between rounds."""
    return summary([a / b for a, b in zip(over, under)])
