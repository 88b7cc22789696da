"""judge(expectation, record): is this the same training? A pure function of what the reference and an engine wrote.

What is compared, in the order in which a difference could first show: the first weights; at every step each rank's
rows, tensors, loss, then the learning rate and the number of real optimizer steps; the first gradient; at the end
parameters, buffers and the evaluation. docs/proof.md tells the whole.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from samestep.proof import causes
from samestep.proof.causes import Divergence
from samestep.proof.differences import BOUND, FLOOR_ULPS, Comparison, distance, largest_of
from samestep.proof.plan import AS_NUMERICS, INEXACT, TRAININGS
from samestep.proof.too_exact import too_exact
from samestep.proof.trace import EPS, Expectation, of_engine
from samestep.records.record import Record

COUNTED = {"initial weights", "rows", "indices", "tensors received", "weight", "learning rate", "parameter groups"}


@dataclass
class Verdict:
    """verdict: same | approximate | differs | failed | refused | unavailable. bitwise: every weight, to the last bit.

    max_difference: the greatest difference of any weight or buffer at the end; bound: what was allowed for it.
    numerics: of an engine that is inexact by design, how far its weights and loss are off; see `measured`.
    """

    verdict: str
    bitwise: bool = False
    max_difference: float | None = None
    bound: float | None = None
    first_divergence: dict[str, Any] | None = None
    reason: str | None = None
    notes: list[str] = field(default_factory=list)
    numerics: dict[str, Any] | None = None


def judge(loop: Expectation, record: Record, numerics: Expectation | None = None) -> Verdict:
    """Compares an engine's complete record with the reference of its layout.

    numerics: of an engine that is inexact by design, the reference in float32, with its rounding.
    """
    comparison = Comparison(loop, record, inexact=numerics is not None)
    for training in TRAININGS:
        divergence = next(comparison.divergences(training), None)
        if divergence:
            return _verdict(comparison, "differs", first_divergence=asdict(divergence))
    if not comparison.compared:
        return _verdict(
            comparison, "refused", reason=f"ill-conditioned in every tensor: {comparison.ill_conditioned[0]}"
        )
    if comparison.reach.get("sgd", 2) < 2:
        return _verdict(comparison, "refused", reason="ill-conditioned: rounding alone moves the first losses visibly")
    if numerics is None:
        return _verdict(comparison, "same")
    divergence, found = measured(numerics, record)
    divergence = divergence or too_exact(loop, numerics, record)
    if divergence:
        return _verdict(comparison, "differs", first_divergence=asdict(divergence), numerics=found)
    if found["skipped_steps"] >= len(loop.of("sgd")["rates"]):
        return _verdict(comparison, "refused", reason="every step was skipped after an overflow: nothing was trained")
    return _verdict(comparison, "approximate", numerics=found)


def measured(expectation: Expectation, record: Record) -> tuple[Divergence | None, dict[str, Any]]:
    """How far an inexact training is from the exact one after the proof's steps in float32, and what is wrong with it.

    {distance, bound: of the weight that is furthest off; loss_gap: of the last step, relative; skipped_steps}. What
    declares no rounding (PowerSGD) has no bound after its exact steps, and after a skipped step none applies: what it
    reads, its rates and its rows are then still compared.
    """
    name = AS_NUMERICS.format("sgd")
    comparison = Comparison(expectation, record, AS_NUMERICS, inexact=True)
    skipped = max(
        rank["skipped_steps"] for training in INEXACT for rank in record.training(AS_NUMERICS.format(training))
    )
    bounded = expectation.facts["rounds_to"] is not None and not skipped
    counted = COUNTED - {"learning rate"} if skipped else COUNTED
    exact = 0 if skipped else expectation.facts["exact_steps"]

    def counts(seen: Divergence) -> bool:
        early = seen.quantity in ("first gradient", "loss") and (seen.step or 0) <= exact  # the loss before an update
        return bounded or seen.quantity in counted or (exact > 0 and early)

    differing: list[Divergence] = []
    for training in INEXACT:
        comparison.worst = None
        differing += [d for d in comparison.divergences(training) if counts(d)]
    expected, seen = expectation.trace("sgd", 0, comparison.processes), of_engine(record, name)
    last = max(part.step for part in expected.parts[0])
    losses = [sum(p.loss_sum for of in trace.parts for p in of if p.step == last) for trace in (expected, seen)]
    distance, bound = comparison.worst or (None, None)
    gap = abs(losses[1] - losses[0]) / abs(losses[0]) if losses[0] else None
    figures = {"distance": distance, "bound": bound if bounded else None, "loss_gap": gap, "skipped_steps": skipped}
    finite = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in figures.items()}
    return differing[0] if differing else None, finite


def _verdict(comparison: Comparison, verdict: str, **rest: Any) -> Verdict:
    difference, bound = comparison.worst or (None, None)
    if difference is not None and not math.isfinite(difference):
        difference = None  # JSON knows no NaN; the divergence names it
    return Verdict(
        verdict,
        bitwise=comparison.bitwise and verdict == "same",
        max_difference=difference,
        bound=bound,
        notes=comparison.notes(),
        **rest,
    )


def one_process(many: Expectation, one: Expectation, facts: dict[str, Any]) -> dict[str, Any]:
    """Is N-replica training the same as plain one-process training of this job? {same, reason, max_difference}

    facts: the job's `batch_layers` and `random_layers`, from its inspection.
    """
    worst, same = 0.0, True
    eps = EPS[many.facts["dtype"]]
    names = many.of("sgd")["parameters"]
    states = [[e.trace("sgd", variant, 1).state for variant in (0, 1, 2)] for e in (many, one)]
    for name in names:
        a, b = states[0][0][name], states[1][0][name]
        difference = distance(a, b)
        spread = max(distance(of[0][name], shaken[name]) for of in states for shaken in of[1:])
        worst = max(worst, difference)
        same &= bool(difference <= max(BOUND * spread, FLOOR_ULPS * eps * largest_of(a)))
    return {"same": same, "max_difference": worst, "reason": None if same else causes.not_one_process(many, facts)}
