"""Twins for `samestep check`: scripts as people write them, healthy as they stand, each with faults to plant."""

from corpus.faults import FAULTS
from corpus.healthy import HEALTHY

__all__ = ["FAULTS", "HEALTHY"]
