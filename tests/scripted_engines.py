"""Which engines `samestep eject` writes scripts for: not those whose ranks divide the model."""

from __future__ import annotations

from samestep import engine

DIVIDING = ("context", "expert", "pipeline", "tensor")
SCRIPTED = tuple(name for name in engine.names() if name not in DIVIDING)
