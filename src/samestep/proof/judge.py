"""Judges whether an engine's training is the reference's: a pure function of what both wrote.

What is compared, in the order in which a difference could first show: the first weights; at every step each rank's
rows, tensors, loss, then the learning rate and the number of real optimizer steps; the first gradient; at the end
parameters, buffers and the evaluation. docs/proof.md explains it all.
"""

from __future__ import annotations

import math

from samestep.message import as_said
from samestep.proof import job_causes
from samestep.proof.differences import Comparison, bound_of
from samestep.proof.plan import AS_NUMERICS, INEXACT
from samestep.proof.too_exact import too_exact
from samestep.proof.trace import EPS, Expectation, of_engine
from samestep.records.inspection import JobFacts
from samestep.records.plan import TRAININGS
from samestep.records.record import Record
from samestep.records.results import Divergence, Inexactness, OneProcess, Verdict, VerdictWord

# Compared where rounding has no bound, too.
COUNTED = {"initial weights", "rows", "indices", "tensors received", "weight", "learning rate", "parameter groups"}


def judge(loop: Expectation, record: Record, numerics: Expectation | None = None) -> Verdict:
    """Compares an engine's complete record with the reference of its layout.

    numerics: of an engine that is inexact by design, the reference in float32, with its rounding.
    """
    comparison = Comparison(loop, record, inexact=numerics is not None)
    for training in TRAININGS:
        divergence = next(comparison.divergences(training), None)
        if divergence:
            return _verdict(comparison, "differs", first_divergence=divergence)
    if not comparison.compared:
        return _verdict(
            comparison, "refused", reason=_ill_conditioned(f"every tensor, {comparison.ill_conditioned[0]}")
        )
    if comparison.reach.get("sgd", 2) < 2:
        return _verdict(comparison, "refused", reason=_ill_conditioned("the first losses"))
    if numerics is None:
        return _verdict(comparison, "same")
    divergence, inexactness = compare_numerics(numerics, record)
    divergence = divergence or too_exact(loop, numerics, record)
    if divergence:
        return _verdict(comparison, "differs", first_divergence=divergence, numerics=inexactness)
    if inexactness.skipped_steps >= len(loop.of("sgd").rates):
        return _verdict(comparison, "refused", reason="every step was skipped after an overflow: nothing was trained")
    return _verdict(comparison, "approximate", numerics=inexactness)


def _ill_conditioned(what: str) -> str:
    """Says that rounding hides what would be compared."""
    return (
        f"ill-conditioned: rounding alone moves {what}, by more than 0.1 %, which would hide a fault; what amplifies "
        "rounding so, and what helps: docs/proof.md, How close is close enough"
    )


def compare_numerics(numerics: Expectation, record: Record) -> tuple[Divergence | None, Inexactness]:
    """Measures how far an inexact training is from the exact one after the proof's steps in float32.

    Returns the first difference that rounding does not explain, too. What declares no rounding (PowerSGD) has no bound
    after its exact steps, and after a skipped step none applies: what it reads, its rates and its rows are then still
    compared.
    """
    comparison = Comparison(numerics, record, AS_NUMERICS, inexact=True)
    skipped = max(rank.skipped_steps for training in INEXACT for rank in record.training(AS_NUMERICS.format(training)))
    bounded = numerics.facts.rounds_to is not None and not skipped
    counted = COUNTED - {"learning rate"} if skipped else COUNTED
    exact = 0 if skipped else numerics.facts.exact_steps

    def counts(divergence: Divergence) -> bool:
        early = (divergence.step or 0) <= exact  # a loss is taken before its step's update
        compared_early = divergence.quantity in ("first gradient", "loss") and early
        return bounded or divergence.quantity in counted or (exact > 0 and compared_early)

    differing: list[Divergence] = []
    for training in INEXACT:
        comparison.worst = None
        differing += [divergence for divergence in comparison.divergences(training) if counts(divergence)]
    worst, bound = comparison.worst or (None, None)
    inexactness = Inexactness(
        distance=_finite(worst),
        bound=_finite(bound) if bounded else None,
        loss_gap=_finite(_loss_gap(numerics, record)),
        skipped_steps=skipped,
    )
    return differing[0] if differing else None, inexactness


def _loss_gap(numerics: Expectation, record: Record) -> float | None:
    """How far the last step's loss is off, relative to the reference's."""
    expected = numerics.trace("sgd", 0, len(record.ranks))
    observed = of_engine(record, AS_NUMERICS.format("sgd"))
    last = expected.last_step
    want, got = (
        sum(part.loss_sum for of_process in trace.parts for part in of_process if part.step == last)
        for trace in (expected, observed)
    )
    return abs(got - want) / abs(want) if want else None


def _finite(value: float | None) -> float | None:
    """JSON knows no NaN; a divergence names it."""
    return value if value is not None and math.isfinite(value) else None


def _verdict(
    comparison: Comparison,
    verdict: VerdictWord,
    *,
    first_divergence: Divergence | None = None,
    reason: str | None = None,
    numerics: Inexactness | None = None,
) -> Verdict:
    difference, bound = comparison.worst or (None, None)
    return Verdict(
        verdict,
        bitwise=comparison.bitwise and verdict == "same",
        max_difference=_finite(difference),
        bound=bound,
        first_divergence=first_divergence,
        reason=as_said(reason) if reason else None,
        notes=tuple(map(as_said, comparison.notes())),
        numerics=numerics,
    )


def same_as_one(many: Expectation, one: Expectation) -> tuple[bool, float]:
    """Whether N-replica training of a job is plain training in one process: whether both end with the same parameters
    up to rounding, and how far these differ."""
    bounds = _bounds(many, one)
    from_one = many.facts.from_one
    same = bool(from_one) and all(each.distance <= bounds[name] for name, each in from_one.items())
    return same, max((each.distance for each in from_one.values()), default=0.0)


def _bounds(many: Expectation, one: Expectation) -> dict[str, float]:
    """Returns for each parameter the largest difference between N replicas and one that rounding explains."""
    eps = max(EPS[each.facts.dtype] for each in (many, one))  # an engine may take no float64
    spreads = [each.noise_distances("sgd") for each in (many, one)]
    moved, from_one = many.of("sgd").moved, many.facts.from_one
    furthest = max((moved[name].distance for name in from_one), default=0.0)
    return {
        name: bound_of(max(of[name] for of in spreads if of), eps, each.largest, moved[name].largest_before, furthest)
        for name, each in from_one.items()
    }


def not_one_process(worst: float, many: Expectation, one: Expectation, job: JobFacts) -> OneProcess:
    """Says why N replicas do not train as one process, whose parameters differ by `worst`.

    many, one: N replicas and plain training, both without random numbers and batch statistics. What then remains is a
    mistake.
    """
    same, _ = same_as_one(many, one)
    separation = one.facts.separation
    assert separation is not None
    constant_fails = many.facts.draws and not math.isfinite(separation.whole)  # a mean over nothing, say
    if same or separation.unknown or separation.collate_draws or constant_fails:
        reason, advice = job_causes.natural_causes(job, many.facts, separation, hides=not same or constant_fails)
        return OneProcess("no, as expected", worst, as_said(reason), as_said(advice))
    bounds, from_one = _bounds(many, one), many.facts.from_one
    most = max(from_one, key=lambda name: from_one[name].distance / (bounds[name] or 1.0), default="")
    off = f"{most} is {from_one[most].distance:.2g} off, rounding explains {bounds[most]:.2g}" if most else ""
    reason, advice = job_causes.mistake(separation, one.facts.dtype, job, off)
    return OneProcess("no", worst, as_said(reason), as_said(advice))
