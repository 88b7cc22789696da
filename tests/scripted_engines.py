"""Which engines `samestep eject` writes scripts for: of those whose ranks divide the model, on meshes alone."""

from __future__ import annotations

from samestep import engine

DIVIDING = ("context", "expert", "pipeline")
ON_MESHES = (
    ("tensor", "tensor=2"),
    ("tensor", "data=2,tensor=2"),
    ("fsdp", "data=2,shard=2"),
    ("fsdp", "shard=2,tensor=2"),
)
SCRIPTED = tuple(name for name in engine.names() if name not in (*DIVIDING, "tensor"))
