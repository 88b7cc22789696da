"""Says why N ranks do not train as one process does: what is expected to differ, and which mistake a job makes."""

from __future__ import annotations

from math import isclose, isfinite

from samestep.errors import first_few
from samestep.proof.trace import EPS
from samestep.records.inspection import JobFacts
from samestep.records.record import ReferenceLayoutRecord, SeparationRecord

Sentence = tuple[str, str]  # (the reason, what helps)

ROWS_TOGETHER = "docs/job.md, Losses over all rows"
WEIGHTS = "docs/job.md, Weights"
SHARED = "docs/proof.md, What it cannot detect"
CARRIED = "docs/job.md, State carried from step to step"
PADDED = (
    "the model's output for a row depends on the rows beside it, for instance by padding to the longest row",
    "mask what is padded, so that a row's output is the same in every batch",
)


def natural_causes(
    job: JobFacts, neutral: ReferenceLayoutRecord, separation: SeparationRecord, *, hides: bool
) -> Sentence:
    """Names what is expected to differ: BatchNorm and random numbers.

    hides: whether some random numbers are not constant in the neutral trainings: a mistake could hide behind them.
    """
    reasons, advice = [], []
    if separation.collate_draws:
        reasons.append("collate draws random numbers for each rank's own rows, as MixUp does")
        advice.append("draw for each sample, in augment, where that is meant")
    if neutral.batch_statistics:
        name = f" ({job.batch_layers[0]})" if job.batch_layers else ""
        reasons.append(f"BatchNorm{name} normalises over each rank's own rows")
        advice.append("use GroupNorm, or Job(sync_batchnorm=True) on GPUs")
    if neutral.draws:
        if job.random_layers:
            reasons.append(f"dropout ({job.random_layers[0]}) draws another mask on each rank")
            advice.append("random numbers need no change: their distribution is the same")
        else:
            reasons.append("the forward pass or the criterion draws other random numbers on each rank")
            advice.append(
                "random numbers need no change where the loss stays a mean over rows; a mean over what is drawn, such "
                "as masked tokens, weighs rows unequally, which this proof cannot see: draw them in Job.augment"
            )
    if not reasons:
        reasons.append("random numbers that torch does not draw, or statistics of a rank's own rows")
        advice.append("draw random numbers with torch")
    if hides:
        what = ", ".join(separation.unknown) or ("collate" if separation.collate_draws else "")
        reasons.append(
            f"{what} cannot be held constant, so a mistake could hide behind it"
            if what
            else "with constant random numbers the loss is not finite, so a mistake could hide behind them"
        )
    return "; ".join(reasons), "; ".join(advice)


def mistake(separation: SeparationRecord, dtype: str, job: JobFacts, off: str) -> Sentence:
    """Names the mistake of a job whose ranks differ from one process without random numbers and batch statistics.

    off: which weight differs most, for a mistake that the losses do not show.
    """
    losses = _Losses(separation, dtype)
    if not losses.same(separation.again, separation.whole):
        return _keeps_state(separation)
    if job.gather_outputs:
        return _in_forward(separation, losses)
    if losses.is_mean(losses.weights):
        if separation.moved:
            return _keeps_state(separation)
        if job.carry_state:
            return (
                f"its losses are means over rows, its training is not ({off}): the state that it carries on is not "
                "each row's own, or the optimizer, a hook or the model's own code depends on the ranks",
                "let the state of a row hold what that row has seen, and look for what is done once for each batch",
            )
        return (
            f"its losses are means over rows, its training is not ({off}): the optimizer, a hook or the model's own "
            "code depends on the ranks or on the number of micro-batches",
            "look for what is done once for each batch instead of once for each step",
        )
    if losses.same(separation.whole, sum(separation.alone)):
        return "the criterion is a sum over its rows, not a mean", "return the mean, for example with reduction='mean'"
    if len(set(losses.weights)) > 1 and losses.is_mean([1.0] * len(losses.weights)):
        return (
            "Job(weight=…) is given, and the criterion's mean does not use it",
            "weight each row's loss in the criterion as the job's weight says, or leave weight out",
        )
    if losses.output_depends_on_other_rows():
        return PADDED
    ratios = losses.ratios()
    if ratios and losses.is_mean(ratios):
        heaviest, lightest = max(ratios), min(ratios)
        if not lightest:
            return (
                f"rows weigh unequally in the criterion's mean: {ratios.count(0.0)} of the first {len(ratios)} weigh "
                "nothing, as rows whose targets are all ignored do",
                "give each row's weight, 0 for an ignored one: Job(weight=lambda index: …); alone, such rows "
                f"need a loss that is finite: {WEIGHTS}",
            )
        return (
            f"rows weigh unequally in the criterion's mean: the heaviest of the first {len(ratios)} rows weighs "
            f"{heaviest / lightest:.3g} times the lightest, as rows with more tokens do",
            "give each row's weight: Job(weight=lambda index: …), for instance its number of tokens",
        )
    return (
        "the criterion looks at other rows of the batch, as contrastive losses do: on N ranks it sees a rank's own "
        "rows alone",
        f"let it see all ranks' rows, with Job(gather_outputs=True): {ROWS_TOGETHER}",
    )


def _in_forward(separation: SeparationRecord, losses: _Losses) -> Sentence:
    """Of a job whose criterion sees all rows: what is left are its forward pass and what is done once for each step."""
    if losses.output_depends_on_other_rows():
        return PADDED
    if separation.moved:
        return _keeps_state(separation)
    return (
        "the criterion sees all ranks' rows, and the forward pass only a rank's own: what it returns besides its rows "
        "is not a mean over them, or looks at other rows",
        "return what each row gives, and compute the rest in the criterion",
    )


def _keeps_state(separation: SeparationRecord) -> Sentence:
    where = f" ({first_few(separation.moved)})" if separation.moved else ""
    return (
        f"the model or the criterion keeps something from batch to batch{where}, and each rank keeps its own",
        "compute it from the batch alone, keep it out of what is trained, or return it from forward, which carries it "
        f"on with its rows: Job(carry_state=True), {CARRIED}; a state that all ranks share is not proven: {SHARED}",
    )


class _Losses:
    """The losses of a Separation, compared up to rounding."""

    def __init__(self, separation: SeparationRecord, dtype: str) -> None:
        self.seen, self.weights = separation, separation.weights
        self.visible = EPS[dtype] ** 0.5

    def same(self, one: float, other: float) -> bool:
        scale = max((abs(loss) for loss in [*self.seen.alone, self.seen.whole] if isfinite(loss)), default=0.0)
        return isclose(one, other, rel_tol=self.visible, abs_tol=self.visible * scale)

    def output_depends_on_other_rows(self) -> bool:
        return self.seen.output_gap is not None and self.seen.output_gap > self.visible

    def is_mean(self, weights: list[float]) -> bool:
        """Whether the rows' loss is the mean of theirs with these weights, and the halves' losses are, too."""
        alone, half = self.seen.alone, len(self.seen.alone) // 2
        parts = [(self.seen.whole, alone, weights)]
        if half:
            first, second = self.seen.halves
            parts += [(first, alone[:half], weights[:half]), (second, alone[half:], weights[half:])]
        return all(
            self.same(loss, _mean(losses, of_rows)) if any(of_rows) else _weighs_nothing(loss)
            for loss, losses, of_rows in parts
        )

    def ratios(self) -> list[float]:
        """What each row weighs, the first weighing 1, if a pair's loss is their weighted mean; empty if it is not.

        Where the first row has weight 0, pairs with it say nothing, and equal weights are assumed for the others.
        """
        first, ratios = self.seen.alone[0], [1.0]
        if _weighs_nothing(first):
            return [0.0 if _weighs_nothing(loss) else 1.0 for loss in self.seen.alone]
        for loss, pair in zip(self.seen.alone[1:], self.seen.pairs):
            if _weighs_nothing(loss) and self.same(pair, first):
                ratios.append(0.0)
                continue
            if self.same(loss, first) or self.same(pair, loss):
                return []
            ratios.append((first - pair) / (pair - loss))
        return ratios if all(isfinite(ratio) and ratio >= 0 for ratio in ratios) else []


def _weighs_nothing(loss: float) -> bool:
    """Whether a row's loss alone is that of a mean over nothing: 0 / 0, or 0 where the divisor is at least 1."""
    return loss == 0 or not isfinite(loss)


def _mean(losses: list[float], weights: list[float]) -> float:
    total = sum(weights)
    return sum(loss * weight for loss, weight in zip(losses, weights) if weight) / total if total else float("nan")
