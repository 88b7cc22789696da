"""Which engines `samestep eject` writes scripts for: of those whose ranks divide the model, on meshes alone."""

from __future__ import annotations

from samestep import engine

DIVIDING = ("context", "expert")
ON_MESHES = (
    ("tensor", "tensor=2"),
    ("tensor", "data=2,tensor=2"),
    ("fsdp", "data=2,shard=2"),
    ("fsdp", "shard=2,tensor=2"),
    ("pipeline", "stage=2"),
    ("pipeline", "stage=2,data=2"),
    ("pipeline", "stage=2,shard=2"),
)
SCRIPTED = tuple(name for name in engine.names() if name not in (*DIVIDING, "tensor", "pipeline"))
