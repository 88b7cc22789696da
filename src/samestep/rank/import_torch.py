"""Imports torch without collections of garbage, and keeps later ones from looking through its million objects.

To be imported before any other module that imports torch.
"""

import gc

from samestep.world.imports import without_collections

with without_collections():
    import torch  # noqa: F401

    gc.freeze()  # else the first collection would look through all of it; hardly anything of it becomes garbage
