"""Judges a user's script by the record of its ranks, without a reference. Pure functions; see docs/check.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from samestep.proof.script.collectives import collectives
from samestep.proof.script.evaluation import evaluation
from samestep.proof.script.gradients import clipping, gradient
from samestep.proof.script.randoms import randoms
from samestep.proof.script.rows import order, rows
from samestep.proof.script.saves import saves
from samestep.proof.script.stages import of_stages, stages
from samestep.proof.script.updates import initial_weights, rates, schedule, step_counts, updates, weights
from samestep.records.record import Record
from samestep.records.redaction import redacted
from samestep.records.results import Divergence
from samestep.records.script import Answer, CheckResults, Finding, ScriptPlan, ScriptRecord

# Without an answer to one of each of these nothing is proven.
NEEDED = (("steps",), ("initial weights",), ("gradient",), ("loss weight", "replayed gradient"), ("weights",))

OF_REPLICAS = ("rows", "random numbers", "evaluation")  # what only ranks that train other rows must have otherwise
TOGETHER = "the ranks share out the parameters of a tensor-parallel model, and may compute the same rows together"


def judge(plan: ScriptPlan, ranks: Sequence[ScriptRecord], record: Record, command: str = "") -> CheckResults:
    """Answers each question about a script. record: the folder with the ranks' gradients.

    The first divergence is that of the earliest step; of several in one step, that of the earliest question, as the
    questions are asked in the order in which a step goes.
    """
    steps = min(len(rank.steps) for rank in ranks)
    findings = [step_counts(plan, ranks)]
    parts = stages(ranks)
    if steps:
        findings += (
            _findings(ranks, record) if len(parts) == 1 else of_stages(parts, record, lambda of: _findings(of, record))
        )
        findings += [collectives(ranks), saves(ranks)]
    step_s = sum(sum(rank.step_s) for rank in ranks)
    share = sum(rank.record_s for rank in ranks) / step_s if step_s else 0.0
    return CheckResults(
        plan.script,
        redacted(plan.arguments),
        len(ranks),
        steps,
        _answer(findings),
        findings,
        first_divergence(findings),
        share,
        plan.out,
        _notes(ranks),
        command,
    )


def _findings(ranks: Sequence[ScriptRecord], record: Record) -> list[Finding]:
    """Answers the questions about ranks that hold the same parameters."""
    findings = [initial_weights(ranks), rows(ranks), order(ranks), *gradient(ranks, record), clipping(ranks, record)]
    findings += [rates(ranks), schedule(ranks), weights(ranks), updates(ranks, record)]
    findings += [randoms(ranks), evaluation(ranks)]
    if not ranks[0].steps[0].splits:
        return findings
    return [Finding(each.question, "unknown", TOGETHER) if each.question in OF_REPLICAS else each for each in findings]


def with_replay(results: CheckResults, replay_findings: Sequence[Finding]) -> CheckResults:
    """Adds the answers of a replay. What is not replayed is said, and takes no answer away that stands without it."""
    findings = [*results.findings, *replay_findings]
    return replace(results, findings=findings, answer=_answer(findings), first_divergence=first_divergence(findings))


def first_divergence(findings: Sequence[Finding]) -> Divergence | None:
    """Returns the divergence of the earliest step; of several in one step, that of the earliest question."""
    divergences = [each.divergence for each in findings if each.divergence]
    return min(divergences, key=lambda each: -1 if each.step is None else each.step, default=None)


def _answer(findings: Sequence[Finding]) -> Answer:
    if any(each.answer == "differs" for each in findings):
        return "differs"
    answers = {each.question: each.answer for each in findings}
    return "right" if all(any(answers.get(name) == "right" for name in names) for names in NEEDED) else "unknown"


def _notes(ranks: Sequence[ScriptRecord]) -> list[str]:
    notes = list(dict.fromkeys(note for rank in ranks for note in rank.notes))
    local = [name for name in ranks[0].buffers if len({rank.buffers.get(name) for rank in ranks}) > 1]
    if local:
        notes.append(f"{local[0]} is not the same on all ranks: BatchNorm's statistics are each rank's own")
    return notes
