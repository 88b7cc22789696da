"""Plans of a proof: the layouts that the reference plays, and the trainings that an engine's launch runs.

An engine that is inexact by design is proven twice: its loop with the inexact part off, which must be the same, and
its numerics in float32 with it on, which are measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from samestep.engine import Layout, Numerics
from samestep.proof.trace import Expectation
from samestep.records.inspection import EngineFacts, JobFacts
from samestep.records.plan import (
    INTERRUPTED,
    OWN_DTYPE,
    SGD_LR,
    ContinuedLayout,
    Interrupted,
    LayoutPlan,
    LifeOptions,
    ProveTask,
    Subset,
)
from samestep.records.reference_record import ReferenceLayoutRecord

QUICK = ("gradient", "sgd")  # the trainings of a quick proof, and of one on the second number of ranks
# On the second number of ranks: a whole batch and an uneven one, in two epochs; half as many where a step is costly.
SECOND_STEPS = 4
INEXACT = ("gradient", "sgd")  # the trainings that measure an inexact engine's numerics, in float32
# The trainings in the job's own dtype; a run trains with SGD, whose every step is proportional to the gradient.
OWN = ("gradient", "user", "life")
AS_NUMERICS = "numerics of {}"  # their names in the record
AS_OWN = "own dtype of {}"  # the names of those in the job's own dtype


def plain_layout() -> LayoutPlan:
    """Returns the layout of one replica: plain training in one process, to compare the others with."""
    return LayoutPlan(trainings=("sgd",), compared=True)


def held_layouts(ranks: ReferenceLayoutRecord, *, constant: bool = False) -> tuple[LayoutPlan, LayoutPlan]:
    """Returns plain training and that of several replicas, both without batch statistics, and with random numbers that
    each row keeps; or, constant, with constant ones."""
    single = LayoutPlan(dtype=ranks.dtype, held_randomness=True, constant=constant, compared=True, trainings=("sgd",))
    return single, replace(
        single, replicas=ranks.layout.replicas, split=ranks.layout.split, buffers=ranks.layout.buffers
    )


def loop_layout(facts: EngineFacts, continuing: EngineFacts | None = None) -> LayoutPlan:
    """Returns the layout that an engine's loop is compared with. With one replica, all layouts are one, but for
    micro-batches.

    then: the engine that continues the training after an interruption; None: there is no interruption.
    """
    layout, numerics = _working(facts)
    # An exact loop becomes inexact where it keeps its weights in another dtype.
    rounds_to = None if numerics.lossy else numerics.rounds_to
    rounded = LayoutPlan(rounds_to=rounds_to, rounds_weights=rounds_to is not None, dtype=numerics.widest)
    rounded = replace(rounded, micro_batches=layout.micro_batches)
    if layout.replicas > 1:
        rounded = replace(rounded, replicas=layout.replicas, split=layout.split, buffers=layout.buffers)
    if continuing is None:
        return rounded
    after = loop_layout(continuing)
    if after.rounds_to:
        rounded = replace(rounded, rounds_to=after.rounds_to, rounds_weights=True)
    if after.dtype != "float64":
        rounded = replace(rounded, dtype=after.dtype)
    continued = _then(after)
    return rounded if continued == _then(rounded) else replace(rounded, then=continued)


def _then(layout: LayoutPlan) -> ContinuedLayout:
    return ContinuedLayout(layout.replicas, layout.split, layout.buffers, layout.micro_batches)


def numerics_layout(facts: EngineFacts, continuing: EngineFacts | None = None) -> LayoutPlan | None:
    """Returns the layout that an inexact engine's numerics are compared with; None where they are exact. then: as for
    loop_layout."""
    _, numerics = _working(facts)
    if not numerics.lossy:
        return None
    return replace(
        loop_layout(facts, continuing),
        rounds_to=numerics.rounds_to,
        exact_steps=numerics.exact_steps,
        rounds=numerics.rounds,
        dtype="float32",
        trainings=INEXACT,
    )


def own_dtype_layout(facts: EngineFacts) -> LayoutPlan | None:
    """Returns the layout that an exact engine is compared with in the job's own dtype; None for others, and where the
    engine keeps its weights in a dtype of its own."""
    loop, (_, numerics) = loop_layout(facts), _working(facts)
    if numerics.lossy or loop.rounds_to or loop.dtype != "float64":
        return None
    return replace(loop, dtype=OWN_DTYPE, trainings=OWN)


def without_life(layout: LayoutPlan) -> LayoutPlan:
    """Returns a layout without the training `life`, a whole run. SGD decides all the same."""
    names = tuple(name for name in layout.trainings if name != "life")
    return replace(layout, trainings=names if "sgd" in names else (*names, "sgd"))


def second_layout(facts: EngineFacts, job: JobFacts) -> LayoutPlan:
    """Returns the layout that an engine is compared with on the second number of ranks. facts: of the engine there."""
    second = job.proof.second_of(facts)
    assert second
    subset = Subset(second_steps(job), second.ranks, rows=second.proof_rows)
    return replace(loop_layout(facts), trainings=QUICK, subset=subset)


def second_steps(job: JobFacts) -> int:
    """Returns how many steps of SGD are compared on the second number of ranks."""
    rounds = SECOND_STEPS // 2 if job.proof.costly else SECOND_STEPS
    return min(job.proof.steps, rounds * max(1, len(job.optimizer.phases)))


@dataclass(frozen=True)
class LoopTrainings:
    """The trainings in which an engine's loop is compared: their names, their dtype, the learning rate of `sgd`, and
    the requests of `life`."""

    names: tuple[str, ...]
    dtype: str
    sgd_lr: float
    life: LifeOptions = field(default_factory=LifeOptions)


def as_planned(layout: LayoutPlan) -> LoopTrainings:
    """Returns the trainings of a layout as they are before the reference has played any: it may take another dtype and
    another rate. What `life` is asked for is chosen by the reference alone."""
    return LoopTrainings(layout.trainings, layout.dtype, SGD_LR)


def as_played(loop: Expectation) -> LoopTrainings:
    """Returns the trainings as the reference has played them."""
    facts = loop.facts
    life = loop.of("life").life if "life" in facts.trainings else None
    return LoopTrainings((*facts.trainings,), facts.dtype, facts.sgd_lr, life.options if life else LifeOptions())


def second_trainings(
    facts: EngineFacts, loop: Expectation, subset: Subset, extremes: tuple[int, ...] = ()
) -> tuple[ProveTask, ...]:
    """Returns the trainings of an engine's proof on the second number of ranks: those of its loop."""
    planned = trainings(facts, as_played(loop), subset.steps, subset.replicas, subset.rows, extremes)
    return tuple(training for training in planned if training.name in QUICK)


def trainings(
    facts: EngineFacts,
    loop: LoopTrainings,
    steps: int,
    replicas: int,
    rows: int = 0,
    extremes: tuple[int, ...] = (),
    own_dtype: LoopTrainings | None = None,
) -> tuple[ProveTask, ...]:
    """Returns the trainings of an engine's proof. replicas: of the command, for which the subset is cut. rows,
    extremes: of ProveTask. own_dtype: those in the job's own dtype; None: there are none."""
    _, numerics = _working(facts)

    def prove(training: str, name: str, dtype: str, without: bool, played: LoopTrainings = loop) -> ProveTask:
        settings = {**facts.settings, **(numerics.without if without else {})}
        return ProveTask(
            training,
            steps,
            dtype,
            replicas=replicas,
            sgd_lr=played.sgd_lr,
            engine_settings=settings,
            name=name,
            rows=rows,
            life=played.life if training == "life" else LifeOptions(),
            extremes=extremes,
        )

    exact = [prove(name, name, loop.dtype, True) for name in loop.names]
    inexact = [prove(name, AS_NUMERICS.format(name), "float32", False) for name in INEXACT if numerics.lossy]
    in_own = (
        [prove(name, AS_OWN.format(name), OWN_DTYPE, False, own_dtype) for name in own_dtype.names] if own_dtype else []
    )
    return (*exact, *inexact, *in_own)


def interrupted(trainings: tuple[ProveTask, ...], parts: Interrupted) -> tuple[ProveTask, ...]:
    """Returns the trainings of one launch of an interrupted proof. The first also runs those that are not
    interrupted."""
    return tuple(
        replace(training, interrupted=parts) if training.training in INTERRUPTED else training
        for training in trainings
        if training.training in INTERRUPTED or parts.part == "first"
    )


def _working(facts: EngineFacts) -> tuple[Layout, Numerics]:
    """Returns the layout and the numerics of an engine that is not broken."""
    assert facts.layout is not None
    assert facts.numerics is not None
    return facts.layout, facts.numerics
