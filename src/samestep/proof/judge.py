"""Judges whether an engine's training is the reference's: a pure function of what both wrote.

What is compared, in the order in which a difference could first show: the first weights; at every step each rank's
rows, tensors, loss, then the learning rate and the number of real optimizer steps; the first gradient; at the end
parameters, buffers and the evaluation. docs/proof.md explains it all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from samestep.bounds import MORE_DRAWS, TIMES_NOISE
from samestep.message import Message, message
from samestep.proof.compare import Comparison, distance
from samestep.proof.life import compare_life
from samestep.proof.plan import AS_NUMERICS, AS_OWN, INEXACT
from samestep.proof.trace import Expectation, of_engine, sample_like
from samestep.records.files import read
from samestep.records.plan import ReferencePlan
from samestep.records.record import Record
from samestep.records.results import Divergence, Inexactness, Verdict, VerdictWord

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Values = NDArray[np.float64]

# These quantities are compared even where rounding has no bound.
COUNTED = {"initial weights", "rows", "indices", "tensors received", "weight", "learning rate", "parameter groups"}
DIGITS = {"float16": 11, "bfloat16": 8}  # binary digits of a dtype below float32
FACTOR = 8  # times float32's own rounding and the ranks: an element whose loss of digits is larger must show it
ENOUGH = 16  # fewest such elements: one alone may come out right by chance
MANY = 32  # elements, each of which comes out rounded in one case of two


def judge(
    loop: Expectation, record: Record, numerics: Expectation | None = None, in_own_dtype: Expectation | None = None
) -> Verdict:
    """Compares an engine's complete record with the reference of its layout.

    numerics: of an engine that is inexact by design, the reference in float32, with its rounding. in_own_dtype: of an
    exact one, the reference in the job's own dtype.
    """
    comparison = Comparison(loop, record, inexact=numerics is not None)
    if verdict := _of_loop(comparison):
        return verdict
    if numerics is None:
        return _in_own_dtype(comparison, in_own_dtype, record)
    divergence, inexactness = compare_numerics(numerics, record)
    divergence = divergence or too_exact(loop, numerics, record) or too_coarse(numerics, record)
    if divergence:
        return _verdict(comparison, "differs", first_divergence=divergence, numerics=inexactness)
    if inexactness.skipped_steps >= len(loop.of("sgd").rates):
        return _verdict(comparison, "refused", reason=message("every_step_skipped"))
    return _verdict(comparison, "approximate", numerics=inexactness)


def judge_by_draws(
    reference: Record, judge_by: Callable[[Record], Verdict], play: Callable[[ReferencePlan], Record]
) -> Verdict:
    """Judges against a reference, and a difference that is near its bound again, against more draws of its rounding.

    Where one element of a tensor moves by far the most, as where its gradient nearly cancels and Adam makes it large,
    both draws may by chance be a tenth of what rounding does to it.

    reference: with the draws that every proof has. play: has a reference play what a plan says.
    """
    verdict = judge_by(reference)
    difference = verdict.first_divergence
    if difference is None or difference.times_bound is None or difference.times_bound > TIMES_NOISE:
        return verdict
    plan = read(ReferencePlan, reference.folder / "plan.json")
    return judge_by(play(replace(plan, out=f"{reference.folder}-more-draws", noise_runs=MORE_DRAWS)))


def judge_second_size(loop: Expectation, record: Record, *, inexact: bool) -> Verdict:
    """Compares the loop of an engine, recorded on a second number of ranks, with the reference of its layout there.

    inexact: whether the engine is inexact by design.
    """
    comparison = Comparison(loop, record, inexact=inexact)
    verdict = _of_loop(comparison) or _verdict(comparison, "same")
    divergence = verdict.first_divergence
    return replace(verdict, first_divergence=divergence and replace(divergence, ranks=len(record.ranks)))


def _of_loop(comparison: Comparison) -> Verdict | None:
    """Compares all trainings. Returns the verdict where they differ, or cannot be compared; None where they agree."""
    facts = comparison.expectation.facts
    if facts.written and facts.layout.replicas > 1:
        # Each rank then trains other weights, under any engine: no engine is to blame.
        return _verdict(comparison, "refused", reason=message("forward_writes_parameters", names=[*facts.written]))
    for training in facts.trainings:
        if divergence := next(_differences(comparison, training), None):
            return _verdict(comparison, "differs", first_divergence=divergence)
    if not comparison.compared:
        example = next(name for names in comparison.ill_conditioned.values() for name in names)
        return _verdict(comparison, "refused", reason=message("rounding_moves_every_tensor", tensor=example))
    if not comparison.shown:
        return _verdict(comparison, "refused", reason=message("nothing_moves_in_proof"))
    if comparison.reach.get("sgd", 2) < 2:
        return _verdict(comparison, "refused", reason=message("rounding_moves_first_losses"))
    return None


def _differences(comparison: Comparison, training: str) -> Iterator[Divergence]:
    return compare_life(comparison) if training == "life" else comparison.divergences(training)


def _in_own_dtype(proven: Comparison, in_own_dtype: Expectation | None, record: Record) -> Verdict:
    """Returns the verdict on an exact engine that is proven in float64. in_own_dtype: as of judge."""
    if in_own_dtype is None:
        return _verdict(proven, "same")
    comparison, facts = Comparison(in_own_dtype, record, AS_OWN), in_own_dtype.facts
    divergence = next((found for name in facts.trainings for found in _differences(comparison, name)), None)
    verdict = _verdict(proven, "differs" if divergence else "same", first_divergence=divergence)
    notes = [message("own_dtype_not_compared", dtype=facts.dtype, why=why) for why in facts.not_played.values()]
    notes += [note for note in comparison.not_compared if note not in verdict.notes]
    if vague := {name for names in comparison.ill_conditioned.values() for name in names} | {*comparison.unresolved}:
        notes.append(message("own_dtype_shows_little", dtype=facts.dtype, tensors=sorted(vague)))
    return replace(verdict, notes=(*verdict.notes, *notes))


def compare_numerics(numerics: Expectation, record: Record) -> tuple[Divergence | None, Inexactness]:
    """Measures how far an inexact training is from the exact one after the proof's steps in float32.

    Returns the first difference that rounding does not explain, too. An engine that declares no rounding (PowerSGD) has
    no bound after its exact steps, and no bound applies after a skipped step: its tensors, rates and rows are compared
    all the same.
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
    """Returns how far the last step's loss is off, relative to the reference's."""
    expected = numerics.trace("sgd", 0, len(record.ranks), record.ranks[0].world.mesh)
    observed = of_engine(record, AS_NUMERICS.format("sgd"))
    want, got = (
        sum(batch.loss_sum for batch in trace.all_micro_batches if batch.step == expected.last_step)
        for trace in (expected, observed)
    )
    return abs(got - want) / abs(want) if want else None


def _finite(value: float | None) -> float | None:
    """Returns a number, None where it is not finite: JSON has no NaN, and a divergence names it."""
    return value if value is not None and math.isfinite(value) else None


def _verdict(
    comparison: Comparison,
    verdict: VerdictWord,
    *,
    first_divergence: Divergence | None = None,
    reason: Message | None = None,
    numerics: Inexactness | None = None,
) -> Verdict:
    difference, bound = comparison.worst or (None, None)
    if first_divergence and (places := comparison.expectation.facts.asks_rank):
        cause = message("job_asks_for_its_rank", place=places[0], cause=first_divergence.cause)
        first_divergence = replace(first_divergence, cause=cause)
    return Verdict(
        verdict,
        bitwise=comparison.bitwise and verdict == "same",
        max_difference=_finite(difference),
        bound=bound,
        first_divergence=first_divergence,
        reason=reason,
        notes=tuple(comparison.notes()),
        numerics=numerics,
    )


def too_exact(loop: Expectation, numerics: Expectation, record: Record) -> Divergence | None:
    """Returns the divergence of an engine that was asked for float16 or bfloat16, and computed in float32 all the same.

    A hook that was never registered, or an autocast that is not in force, trains in float32 and says nothing. A
    gradient that is rounded cannot be that exact: the reference's first gradient has elements that the lower precision
    cannot hold.

    None wherever a healthy engine could look so: float32's rounding is not known (no float64), one rank alone sends
    nothing, autocast was in force on all ranks (not every model has something that it lowers), or the gradient has too
    few elements in which the rounding would show.
    """
    precision, replicas = numerics.facts.rounds_to, numerics.facts.layout.replicas
    if precision not in DIGITS or numerics.facts.exact_steps or loop.facts.dtype != "float64" or replicas == 1:
        return None
    name = AS_NUMERICS.format("gradient")
    cause = message("lower_precision_not_in_force", precision=precision)
    autocast = [training.autocast for training in record.training(name)]
    if all(autocast):
        return None
    if any(autocast):
        rank = autocast.index(False)
        return Divergence(
            "gradient", 0, "precision", tensor=None, rank=rank, expected=precision, found="float32", cause=cause
        )
    start, end, observed = numerics.start(), numerics.arrays("gradient"), record.arrays(name)
    in_float32, in_float64 = (expectation.arrays("gradient", ".own") for expectation in (numerics, loop))
    informative = 0
    for tensor, sample in in_float32.items():
        want, got = _float64(end[tensor]), _float64(observed[tensor])
        # Rounding of the gradient, measured on rank 0's own, and that of the weights from which it is read.
        read = np.spacing(np.maximum(np.abs(want), np.abs(got)).astype(np.float32))
        rounding = TIMES_NOISE * distance(sample, in_float64[tensor]) + 2 * _float64(read)
        if not (np.abs(want - got) <= rounding).all():
            return None
        gradients = _float64(start[tensor]) - sample_like(want, sample), _float64(sample)
        lost = np.minimum(*(np.abs(values - _rounded(values, DIGITS[precision])) for values in gradients))
        informative += int((lost > FACTOR * replicas * sample_like(rounding, sample)).sum())
    if informative < ENOUGH:
        return None
    return Divergence(
        "gradient", 0, "precision", tensor=None, rank=None, expected=precision, found="float32", cause=cause
    )


def too_coarse(numerics: Expectation, record: Record) -> Divergence | None:
    """Returns the divergence of an engine that averages the ranks' gradients in the lower precision of its passes,
    though it says that it does not: they are rounded a second time, which the bound for the first one hides.

    The average of two numbers of some digits mostly has more of them. The elements that count are those to which rank 0
    and the others give parts of the same sign, where the weights from which they are read show these digits.
    """
    facts = numerics.facts
    precision, replicas = facts.rounds_to, facts.layout.replicas
    if facts.rounds != "passes" or precision not in DIGITS or replicas == 1:
        return None
    name, digit = AS_NUMERICS.format("gradient"), 2.0 ** -DIGITS[precision]
    start, end, observed = numerics.start(), numerics.arrays("gradient"), record.arrays(name)
    for tensor, sample in numerics.arrays("gradient", ".own").items():
        before, after = _float64(start[tensor]), _float64(sample_like(observed[tensor], sample))
        own_gradient, want = _float64(sample), before - _float64(sample_like(end[tensor], sample))
        others_gradient, got = replicas * want - own_gradient, before - after
        read = _float64(np.spacing(np.maximum(np.abs(before), np.abs(after)).astype(np.float32)))
        adds = np.minimum(own_gradient * want, others_gradient * want) > digit * want**2
        shows = (
            adds
            & (np.abs(own_gradient - others_gradient) > digit * np.abs(want))
            & (digit * np.abs(got) > FACTOR * read)
        )
        if shows.sum() >= MANY and (np.abs(got - _rounded(got, DIGITS[precision])) <= read)[shows].all():
            cause = message("gradients_averaged_in_lower_precision", precision=precision)
            return Divergence(
                "gradient", 0, "precision", tensor=tensor, rank=None, expected=facts.dtype, found=precision, cause=cause
            )
    return None


def _float64(values: Any) -> Values:
    return np.asarray(values, dtype=np.float64)


def _rounded(values: Values, digits: int) -> Values:
    """Values rounded to so many binary digits. The tiniest, which float16 holds with fewer, lose more than this."""
    mantissa, exponent = np.frexp(values)
    return np.asarray(np.ldexp(np.round(np.ldexp(mantissa, digits)), exponent - digits))
