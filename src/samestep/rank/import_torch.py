"""Imports torch without collections of garbage, and keeps later ones from looking through its million objects.

To be imported before any other module that imports torch. A worker writes its stacks to its log on SIGUSR1 from here
on: importing torch is the first thing that may hang, as on a disk that does not answer.
"""

import faulthandler
import gc
import signal
import sys

from samestep.world.imports import without_collections

# Not in a process of the user's. These are arguments of python: `-m samestep.worker`, or a `-c` that imports it.
if any("samestep.worker" in word for word in sys.orig_argv[1:4]) and hasattr(signal, "SIGUSR1"):
    faulthandler.register(signal.SIGUSR1, all_threads=True)

with without_collections():
    import torch  # noqa: F401

    # Otherwise the first collection would look through all objects of torch, hardly any of which becomes garbage.
    gc.freeze()
