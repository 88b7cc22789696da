"""The names of the files that a launch writes: what an earlier one has left is removed by these, and nothing else."""

from __future__ import annotations

import re

from samestep.records.checkpoint import FOLDER
from samestep.records.record import ENVIRONMENT, PROGRESS


def _names(*alternatives: str) -> str:
    """Returns a pattern of these names, and of the temporary files that were to get them."""
    names = "|".join(alternatives)
    return rf"(?:\.(?:{names})\.(?:\d+|part)|{names})"


_RANKS = _names(
    r"(?:heartbeat|pid|error|stack)-rank\d+(?:\.json|\.txt)?",
    r"\.room-rank\d+",
    r"rank\d+(?:\.[\w -]+)*\.(?:json|npz|log|log\.1)",
    r"(?:log(?:-.+)?|hang|stacks-of-threads)\.txt",
    *("rendezvous", re.escape(PROGRESS), re.escape(ENVIRONMENT)),
)
_LEFT = _names(r"wait-\d+\.json", r"end-rank\d+\.json")
_PARTS = _names(r"rank\d+\.(?:json|safetensors)", r"manifest\.json", r"[\w-]+\.safetensors")
_STEPS = rf"(?:step-\d+|\.step-\d+\.(?:part|gone))/{_PARTS}"
_WEIGHTS = _names(r"\.?[\w.-]+\.safetensors", r"predictions\.npy")

OF_RANKS = re.compile(_RANKS)  # in a folder that holds results, too
OF_A_STEP = re.compile(_PARTS)  # of a checkpoint or a spot check
OF_CHECKPOINTS = re.compile(rf"(?:[\w.-]+/)?{_STEPS}|{_WEIGHTS}")  # of a proof, which has them for each training
OF_SPOT_CHECKS = re.compile(rf"{_names('plan[.]json')}|{_STEPS}")
OF_A_LAUNCH = re.compile(  # in a folder of its own
    rf"{_RANKS}|{_names(r'(?:plan|verdict|usage)[.]json', r'usage[.]csv')}|questions/rank\d+(?:-\w)?(?:[.]new)?"
    rf"|torchrun/(?:[^/]+/)+\w+\.(?:log|json)|life/(?:{_WEIGHTS}|{FOLDER}/{_STEPS})"
)
OF_A_CHECK = re.compile(
    rf"{OF_A_LAUNCH.pattern}|{_names(r'(?:study|command|results|script-plan)[.]json')}|[.]lock"
    r"|(?:closures|unfinished)-rank\d+\.json|rank\d+(?:\.\w+)*\.(?:pt|pkl)|python/(?:__pycache__/)?sitecustomize\.[\w.-]+"
    rf"|chain/(?:{_RANKS}|chain\.json)"
)
# What `monitor` has its ranks write, in a folder of their own.
OF_MONITORED = re.compile(
    rf"{_RANKS}|{_LEFT}|monitored-\d+|questions/rank\d+(?:-\w)?(?:[.]new)?|python/(?:__pycache__/)?sitecustomize\.[\w.-]+"
)
