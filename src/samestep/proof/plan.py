"""What a proof has the reference play and an engine train: plans, as plain values, that workers read.

An engine that is inexact by design is proven twice: its loop with the inexact part off, which must be the same, and
its numerics in float32 with it on, which are measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samestep.proof.trace import Expectation

TRAININGS = ("gradient", "sgd", "user")
INEXACT = ("gradient", "sgd")  # the trainings that measure an inexact engine's numerics, in float32
AS_NUMERICS = "numerics of {}"  # how the record names them

Facts = Mapping[str, Any]  # of an engine, as its inspection tells them


def plain_layout() -> dict[str, Any]:
    """One replica: plain training in one process. dtype: the widest in which it is played."""
    return {
        "replicas": 1,
        "split": "even",
        "buffers": "rank0",
        "rounds_to": None,
        "rounds_weights": False,
        "exact_steps": 0,
        "dtype": "float64",
        "trainings": TRAININGS,
    }


def loop_layout(facts: Facts) -> dict[str, Any]:
    """What the reference plays to prove an engine's loop. With one replica, all layouts are one."""
    rounds_to = None if facts["numerics"]["lossy"] else facts["numerics"]["rounds_to"]
    shape = {key: facts["layout"][key] for key in ("replicas", "split", "buffers")}
    layout = plain_layout() if shape["replicas"] == 1 else {**plain_layout(), **shape}
    # What is inexact in an exact loop is that it keeps its weights in another dtype.
    rounding = {"rounds_to": rounds_to, "rounds_weights": rounds_to is not None}
    return {**layout, **rounding, "dtype": facts["numerics"]["widest"]}


def numerics_layout(facts: Facts) -> dict[str, Any] | None:
    """What it plays to measure its numerics; None where they are exact."""
    if not facts["numerics"]["lossy"]:
        return None
    rounding = {key: facts["numerics"][key] for key in ("rounds_to", "exact_steps")}
    inexact = {**rounding, "dtype": "float32", "trainings": INEXACT}
    return {**loop_layout(facts), **inexact}


def trainings(facts: Facts, loop: Expectation, steps: int, replicas: int) -> list[dict[str, Any]]:
    """What a launch of the engine trains for its proof. replicas: of the study, for which the subset is cut."""
    common = {"kind": "prove", "steps": steps, "replicas": replicas, "sgd_lr": loop.facts["sgd_lr"]}
    exact = {"dtype": loop.facts["dtype"], "engine_settings": {**facts["settings"], **facts["numerics"]["without"]}}
    asked = [{**common, **exact, "name": name, "as": name} for name in TRAININGS]
    if facts["numerics"]["lossy"]:
        inexact = {"dtype": "float32", "engine_settings": dict(facts["settings"])}
        asked += [{**common, **inexact, "name": name, "as": AS_NUMERICS.format(name)} for name in INEXACT]
    return asked
