"""The stages of a pipeline: ranks that hold other parameters train no other rows. Each stage is judged by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from samestep.proof.script.step_gradients import StepGradients
from samestep.proof.script.updates import Ranks, differs
from samestep.records.record import Record
from samestep.records.script import Finding, ScriptRecord

NEAR = 1e-3
STAGES = "each rank holds another stage of a pipeline, which one process does not run"
APART = (
    "the stages of the pipeline scale their gradients otherwise: {:.6g} times what the ranks of stage {} computed, and "
    "{:.6g} times in stage 0 (scale_grads of one schedule, or a loss divided in one place alone)"
)


def stages(ranks: Ranks) -> list[list[ScriptRecord]]:
    """Returns the ranks of each stage, which has no parameter of another; all as one where they are no stages."""
    of: dict[frozenset[str], list[ScriptRecord]] = {}
    for rank in ranks:
        of.setdefault(_held(rank), []).append(rank)
    count = sum(map(len, of))
    return [*of.values()] if all(of) and count == len(frozenset().union(*of)) else [[*ranks]]


def _held(rank: ScriptRecord) -> frozenset[str]:
    """Returns the names of the parameters of which a rank holds something."""
    return frozenset(rank.start).union(*((*step.weights, *step.shards) for step in rank.steps))


def of_stages(parts: Sequence[Ranks], record: Record, ask: Callable[[Ranks], Sequence[Finding]]) -> list[Finding]:
    """Asks each stage, and returns one answer to each question, in their order."""
    each = [{finding.question: _of_stage(finding, part) for finding in ask(part)} for part in parts]
    losses = [number for number, part in enumerate(parts) if _has_loss(part)]
    findings = []
    for question in dict.fromkeys(name for answers in each for name in answers):
        numbers = losses or [*range(len(parts))] if question in ("loss weight", "evaluation") else [*range(len(parts))]
        findings.append(
            _together(question, {number: each[number][question] for number in numbers if question in each[number]})
        )
        if question == "gradient" and findings[-1].answer == "right":
            findings[-1] = _scaled_apart(parts, record) or findings[-1]
    return findings


def _together(question: str, answers: Mapping[int, Finding]) -> Finding:
    """Returns the gravest answer of the stages; where all are right, that of the first."""
    for answer in ("differs", "unknown", "warning"):
        for number, finding in answers.items():
            if finding.answer == answer:
                return (
                    finding if answer == "differs" else replace(finding, sentence=f"stage {number}: {finding.sentence}")
                )
    (number, first), *others = answers.items()
    where = f"stage {number} of the pipeline" if not others else f"each of {len(answers)} stages of a pipeline"
    return Finding(question, "right", f"{where}: {first.sentence}")


def _of_stage(finding: Finding, part: Ranks) -> Finding:
    """Returns an answer with the number that a rank has among all."""
    where = finding.divergence
    if where is None or where.rank is None:
        return finding
    return replace(finding, divergence=replace(where, rank=part[where.rank].rank))


def _has_loss(part: Ranks) -> bool:
    return any(micro.losses for rank in part for step in rank.steps for micro in step.micro)


def _scaled_apart(parts: Sequence[Ranks], record: Record) -> Finding | None:
    """Finds a stage whose gradients are scaled otherwise than those of the first."""
    of = [StepGradients.read(record, part, 0) for part in parts]
    factors = [each.factor * each.size for each in of if each.names]
    for number, factor in enumerate(factors):
        if abs(factor / factors[0] - 1) > NEAR:
            cause = APART.format(factor, number, factors[0])
            rank = parts[number][0].rank
            return differs("gradient", "factor", cause, step=0, rank=rank, expected=factors[0], found=factor)
    return None
