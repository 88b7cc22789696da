"""Imports torch, and has no collection of garbage look through the million objects that this creates: a rank starts in
five sixths of the time. To be imported before any other module that imports torch.
"""

import gc

from samestep.world.imports import without_collections

with without_collections():
    import torch  # noqa: F401

    gc.freeze()  # else the first collection would look through all of it; nothing of it becomes garbage
