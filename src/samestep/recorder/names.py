"""Names of parameters that are the same on every rank, and under every wrapper."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

WRAPPERS = ("module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
PIPELINES = "torch.distributed.pipelining.stage"


def plain(name: str) -> str:
    """Returns a parameter's name without the names of wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def stage_prefix() -> str:
    """Returns the words before the names of a pipeline's stage, of which the present forward is; '' of none.

    Two stages may have parameters of the same names, which are no replicas of each other.
    """
    frame: FrameType | None = sys._getframe() if PIPELINES in sys.modules else None
    while frame:
        of: Any = frame.f_locals.get("self")
        if type(of).__module__ == PIPELINES and hasattr(of, "stage_index"):
            return f"stage {of.stage_index}: "
        frame = frame.f_back
    return ""
