"""Judges whether a pipeline takes the steps of one process, by comparing its ranks with the chain of its stages.

Each step is judged from the weights that the ranks had: the gradient of each stage, its factor, the factor of all
stages together, and the norm by which the script clips.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from samestep.bounds import (
    FIRST_STEP_APART,
    LOSS_APART_OF_MEANS,
    LOSS_APART_OF_STAGES,
    LOSS_LEAST,
    LOSS_LEAST_OF_MEANS,
    NORMS_TOLD_APART,
    QUOTIENTS_TOLD_APART,
    TIMES_NEAR_OF_FACTOR,
    TOLD_APART,
)
from samestep.judge.against_one_process import not_replayed
from samestep.judge.clipping import clipped_together
from samestep.judge.findings import Ranks, common_steps, differs
from samestep.judge.fit import count_in
from samestep.judge.pipeline_gradients import Apart, PipelineGradients
from samestep.judge.step_gradients import coarser_of
from samestep.message import Message, message
from samestep.records.findings import Finding
from samestep.records.pipeline_replay import PipelineReplayRecord
from samestep.records.record import Record

Factors = dict[tuple[int, int], float]  # (rank, stage) -> the factor of its gradients to those of the whole model
# The questions that the chain answers, beside the replayed gradient.
QUESTIONS = ("gradient", "loss weight", "clipping")


def judge_pipeline_replay(
    chain: PipelineReplayRecord, ranks: Ranks, stages: Sequence[Ranks], *, record: Record, played: Record
) -> list[Finding]:
    """Compares the gradients of each step with the chain's. stages: the ranks that hold the same stages."""
    if why := chain.why_not or _another_loss(chain, ranks):
        return [Finding("gradient", "unknown", message("not_replayed", why=why)), not_replayed(why)]
    close, factors, last = FIRST_STEP_APART * coarser_of(ranks), list[Factors](), list[PipelineGradients]()
    for step in common_steps(ranks)[: len(chain.steps)]:
        gradients = PipelineGradients.read(chain, ranks, record, played, step, close)
        if last:
            gradients.earlier = last[-1].taken
        of_step: Factors = {}
        for rank in ranks:
            for stage in rank.stages:
                factor, apart = gradients.stage_factor(rank.rank, stage.index)
                if apart:
                    return [_apart(apart, step, chain)]
                if factor is not None:
                    of_step[rank.rank, stage.index] = factor
        factors.append(of_step)
        last = [gradients]
    if not any(factors):
        return [Finding("gradient", "unknown", message("no_gradient_seen"))]
    return [_right_gradient(chain, len(factors)), *_scales(chain, ranks, stages, record=record, factors=factors)]


def _another_loss(chain: PipelineReplayRecord, ranks: Ranks) -> Message | None:
    """Returns that the chain is not the model that the ranks train: it computes another loss of the same rows."""
    if not chain.steps:
        return message("no_step_to_replay")
    for number, step in enumerate(chain.steps):
        bound = LOSS_APART_OF_STAGES * coarser_of(ranks)
        pairs = list(zip(step.recorded, step.played))
        apart = [pair for pair in pairs if not math.isclose(*pair, rel_tol=bound, abs_tol=LOSS_LEAST)]
        if len(step.recorded) != len(step.played):
            return message("chain_has_other_micro_batches", recorded=len(step.recorded), played=len(step.played))
        if apart:
            return message("chain_has_another_loss", step=number, recorded=apart[0][0], played=apart[0][1])
    return None


def _right_gradient(chain: PipelineReplayRecord, steps: int) -> Finding:
    figures = {"stages": len(chain.stages), "replicas": len(chain.replicas), "steps": steps}
    return Finding("gradient", "right", message("stages_have_the_whole_gradient", **figures))


def _apart(apart: Apart, step: int, chain: PipelineReplayRecord) -> Finding:
    axis = "data" if apart.cause.id == "stage_not_reduced_over_replicas" else "stage"
    expected, found = message("gradient_of_the_chain"), message("gradient_of_another_kind")
    return differs(
        "gradient",
        f"gradient along {axis}",
        apart.cause,
        step=step,
        tensor=apart.name,
        rank=apart.rank,
        expected=expected,
        found=found,
    )


# The factors of the stages


def _scales(
    chain: PipelineReplayRecord, ranks: Ranks, stages: Sequence[Ranks], *, record: Record, factors: Sequence[Factors]
) -> list[Finding]:
    """Judges by what the stages' gradients are scaled: the loss's weight, or a clipping that the script does itself."""
    first = next(of_step for of_step in factors if of_step)
    clipped = any(
        _are_apart(of_step) or abs(_first(of_step) / _first(first) - 1) > QUOTIENTS_TOLD_APART
        for of_step in factors
        if of_step
    )
    if by_norm := _clipped_by_hand(chain, ranks, factors):
        finding = by_norm
        if finding.answer != "right":
            return [finding]
        return [_weight_of_one(chain), finding, _one_process(chain, factors)]
    if _are_apart(first):
        (rank, stage), factor = next(item for item in first.items() if abs(item[1] / _first(first) - 1) > TOLD_APART)
        first_stage = min(stage for _, stage in first)
        cause = message("stages_scale_gradients_apart", factor=factor, stage=stage, first=_first(first))
        quantity, expected = f"factor along stage, of stage {first_stage}", _first(first)
        return [differs("gradient", quantity, cause, step=0, rank=rank, expected=expected, found=factor)]
    factor = _first(first)
    if wrong := _wrong_weight(factor, chain, TOLD_APART * coarser_of(ranks)):
        return [differs("loss weight", "factor", wrong, step=0, rank=0, expected=1.0, found=factor)]
    if clipped:
        changed = [n for n, of_step in enumerate(factors) if of_step and abs(_first(of_step) / factor - 1) > TOLD_APART]
        step = changed[0] if changed else 0
        said = message("stages_scaled_later", step=step, factor=_first(factors[step]))
        return [_weight_of_one(chain), Finding("clipping", "unknown", said)]
    norms = {number: abs(factor) * step.norm for number, step in enumerate(chain.steps)}
    clipping = clipped_together(stages, record, norms)
    if clipping is None and any(step.clips for rank in ranks for step in rank.steps):
        clipping = Finding("clipping", "unknown", message("clipped_by_no_one_norm"))
    elif clipping is None:
        clipping = Finding("clipping", "right", message("nothing_is_clipped"))
    findings = [_weight_of_one(chain), clipping, _one_process(chain, factors)]
    return [*findings, *_unequal(chain, ranks)]


def _wrong_weight(factor: float, chain: PipelineReplayRecord, near: float) -> Message | None:
    """Returns the mistake in the weight of the micro-batches' losses, by the factor of the gradients and the factor of
    the loss function; None where their product is one, or the loss function's is a coefficient."""
    weight = 1.0 if chain.weight is None else abs(chain.weight)
    if abs(factor * weight - 1) <= TIMES_NEAR_OF_FACTOR * near:
        return None
    if abs(factor - 1) > TIMES_NEAR_OF_FACTOR * near:
        return _cause_of_factor(factor, chain)
    numbers = {chain.micro_batches, len(chain.replicas)} - {1}
    divided = any(abs(weight * number - 1) <= TOLD_APART for number in numbers)
    return _cause_of_factor(factor * weight, chain) if divided else None


def _cause_of_factor(factor: float, chain: PipelineReplayRecord) -> Message:
    micro_batches, replicas = chain.micro_batches, len(chain.replicas)
    match count_in(factor, {"micro_batches": micro_batches, "replicas": replicas}):
        case "micro_batches", True:
            return message("micro_batches_never_divided", micro_batches=micro_batches)
        case "micro_batches", False:
            return message("micro_batches_divided_twice", micro_batches=micro_batches)
        case "replicas", True:
            return message("stages_summed_over_replicas", replicas=replicas)
        case "replicas", False:
            return message("stages_divided_by_replicas_again", replicas=replicas)
    return message("loss_is_scaled", factor=factor, told=None)


def _weight_of_one(chain: PipelineReplayRecord) -> Finding:
    said = message("micro_batches_weigh_one_together", micro_batches=chain.micro_batches, replicas=len(chain.replicas))
    return Finding("loss weight", "right", said)


def _one_process(chain: PipelineReplayRecord, factors: Sequence[Factors]) -> Finding:
    said = message("gradient_of_the_chain_in_steps", stages=len(chain.stages), steps=len(factors))
    return Finding("replayed gradient", "right", said)


def _unequal(chain: PipelineReplayRecord, ranks: Ranks) -> list[Finding]:
    """Warns of a loss whose mean over micro-batches is not that over the batch."""
    losses = chain.steps[0].played[: chain.micro_batches]
    if chain.whole_loss is None or chain.reduction != "mean" or len(losses) != chain.micro_batches:
        return []
    mean = sum(losses) / len(losses)
    if math.isclose(
        mean, chain.whole_loss, rel_tol=LOSS_APART_OF_MEANS * coarser_of(ranks), abs_tol=LOSS_LEAST_OF_MEANS
    ):
        return []
    said = message("mean_of_micro_batches_of_unequal_targets", mean=mean, whole=chain.whole_loss)
    return [Finding("loss", "warning", said)]


# Clipping


def _clipped_by_hand(chain: PipelineReplayRecord, ranks: Ranks, factors: Sequence[Factors]) -> Finding | None:
    """Returns by which norm the script itself clips: that of all stages, or another; None where it does not clip.

    Clipped gradients have the same norm in each clipped step; other gradients do not.
    """
    if any(step.clips for rank in ranks for step in rank.steps):
        return None
    smaller = [n for n, of_step in enumerate(factors) if of_step and _least(of_step) < 1 - TOLD_APART]
    norms = [chain.steps[n].norm for n in smaller]
    if len(smaller) < 2 or max(norms) - min(norms) <= NORMS_TOLD_APART * max(norms):
        return None
    if not any(_are_apart(factors[n]) for n in smaller):
        if _is_one([_first(factors[n]) * chain.steps[n].norm for n in smaller]):
            return Finding("clipping", "right", message("clipped_by_the_whole_norm", steps=len(smaller)))
        twice = [math.hypot(chain.steps[n].norm, *(chain.steps[n].norms[g[0]] for g in chain.ties)) for n in smaller]
        if chain.ties and _is_one([_first(factors[n]) * norm for n, norm in zip(smaller, twice)]):
            cause = message("tied_weight_counted_twice", names=chain.ties[0])
            found, once = _first(factors[smaller[0]]), chain.steps[smaller[0]].norm
            expected = found * twice[0] / once
            return differs(
                "clipping", "factor along stage", cause, step=smaller[0], rank=0, expected=expected, found=found
            )
        return None
    held = {rank.rank: [stage.index for stage in rank.stages] for rank in ranks}
    clipped = []
    for n in smaller:
        for rank, stages in held.items():
            of_rank = [factors[n][rank, stage] for stage in stages if (rank, stage) in factors[n]]
            if of_rank and max(of_rank) < 1 - TOLD_APART:
                names = [name for stage in stages for name in chain.stages[stage]]
                clipped.append(of_rank[0] * math.sqrt(sum(chain.steps[n].norms.get(name, 0.0) ** 2 for name in names)))
    if not _is_one(clipped):
        return None
    step = factors[smaller[0]]
    cause = message("clipped_by_stage_norms", factors=[round(factor, 4) for factor in step.values()])
    rank = (
        next(rank for (rank, _), factor in step.items() if abs(factor / _first(step) - 1) > TOLD_APART)
        if _are_apart(step)
        else 0
    )
    return differs(
        "clipping",
        "factor along stage",
        cause,
        step=smaller[0],
        rank=rank,
        expected=message("one_factor"),
        found=cause.fields["factors"],
    )


def _is_one(values: Sequence[float]) -> bool:
    return len(values) > 1 and max(values) - min(values) <= QUOTIENTS_TOLD_APART * max(values)


def _first(factors: Factors) -> float:
    return next(iter(factors.values()))


def _least(factors: Factors) -> float:
    return min(factors.values())


def _are_apart(factors: Factors) -> bool:
    return max(factors.values()) - min(factors.values()) > QUOTIENTS_TOLD_APART * abs(_first(factors))
