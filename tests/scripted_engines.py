"""The engines for which `samestep eject` writes a script, and those whose ranks divide the model, for which it does not."""

from __future__ import annotations

from samestep import engine

DIVIDING = ("context", "pipeline", "tensor")
SCRIPTED = tuple(name for name in engine.names() if name not in DIVIDING)
