"""Judges a user's script by the records of its ranks. Pure functions; see docs/check.md.

`judge` asks each question of the ranks; `with_replay` adds what one process shows. Which file answers what:

- what the ranks are to each other: layout; by_hand, of layers that a script divides itself
- whole tensors of ranks that hold pieces: assembled (DTensors), same_pieces (by hand)
- rows and their order: rows; first weights and weights after each step: updates, copies
- the gradient, as a mean of the ranks' own: gradients, step_gradients, gradient_weights, loss_weight
- the gradient, against one process: gradient_comparison, and what each layout knows of a difference:
  against_one_process, by_hand_gradients, pipeline_gradients; the module where it begins: first_module
- ranks that step apart on purpose, and what they bring together: steps_apart, meetings
- clipping: clipping; rates: updates, against_one_process; schedules: schedules, rate_factors
- ranks of one replica: replicas, replica_causes (DTensors), judge_by_hand; stages: pipelines, pipeline_replay
- two recordings, before and after a change: diff, diff_gradients, diff_weights, diff_settings
- the line and the patch: places, sites, source, source_search, suggested_patches, edits
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

from samestep.bounds import TOLD_APART
from samestep.judge.assembled import ReplicaRecord, of_replicas
from samestep.judge.beside_steps import collectives, randoms, saves
from samestep.judge.clipping import clipped_together, clipping
from samestep.judge.coefficients import with_one_process, without_coefficients
from samestep.judge.evaluation import evaluation
from samestep.judge.findings import Ranks, differs
from samestep.judge.frozen_weights import untrained, with_effects
from samestep.judge.gradients import changed_alike, gradient
from samestep.judge.layout import ByHand, Layout, TensorLayout, compute_together, has_loss
from samestep.judge.pipelines import pipeline_findings
from samestep.judge.places import Sources
from samestep.judge.remedies import with_remedies
from samestep.judge.replicas import of_layout, with_replicas, within_replicas
from samestep.judge.reported_values import own_values
from samestep.judge.rows import order, rows, rows_along_stages
from samestep.judge.schedules import with_schedules
from samestep.judge.sites import located
from samestep.judge.step_gradients import StepGradients
from samestep.judge.steps_apart import StepsApart
from samestep.judge.suggested_patches import patch_of
from samestep.judge.uncalled_code import uncalled_code
from samestep.judge.updates import initial_weights, rates, schedule, step_counts, updates, weights
from samestep.judge.warnings import warnings
from samestep.message import Message, message
from samestep.records.findings import Answer, CheckResults, Finding, Question
from samestep.records.record import Record
from samestep.records.redaction import redacted
from samestep.records.results import Divergence
from samestep.records.script import ON_CPUS, STATISTICS, ScriptRecord
from samestep.records.script_plan import ScriptPlan

# Nothing is proven unless one question of each group is answered.
NEEDED: tuple[tuple[Question, ...], ...] = (
    ("steps",),
    ("rows",),
    ("initial weights",),
    ("gradient",),
    ("loss weight", "replayed gradient"),
    ("weights",),
)
OF_HAND: tuple[Question, ...] = (  # the answers that differ where ranks compute pieces
    "initial weights",
    "rows",
    "gradient",
    "loss weight",
    "clipping",
    "weights",
    "random numbers",
    "evaluation",
    "frozen weights",
    "updates",
)
OTHER_ROWS = "replica_reads_other_rows"
# The answers that change where ranks of a replica have other rows.
OF_OTHER_ROWS = ("order", "gradient", "loss weight", "clipping", "weights")
OF_THE_LOSS = ("loss weight", "evaluation")  # the questions that only the pipeline stages with a loss can answer


def judge(plan: ScriptPlan, ranks: Sequence[ScriptRecord], record: Record, command: str = "") -> CheckResults:
    """Answers each question about a script. record: the folder with the ranks' gradients.

    The first divergence is that of the earliest step; of several in one step, that of the earliest question, as the
    questions are asked in the order in which a step goes.
    """
    steps = min(len(rank.steps) for rank in ranks)
    findings = [step_counts(plan, ranks)]
    layout = Layout.of(ranks)
    if steps:
        findings += _of_layout(layout, ranks, record, plan.meant)
        mistakes = warnings(ranks)
        wrong = {finding.question for finding in mistakes if finding.answer == "differs"}
        findings = [finding for finding in findings if finding.answer != "right" or finding.question not in wrong]
        if any(finding.message.id == "no_process_group" for finding in mistakes):
            findings = [_of_rank_alone(finding) for finding in findings]
        if any(finding.message.id == "left_in_evaluation_mode" for finding in mistakes):
            findings = [_of_evaluation_mode(finding) for finding in findings]
        findings += [collectives(ranks), saves(ranks), *mistakes]
    step_s = sum(sum(rank.step_s) for rank in ranks)
    results = CheckResults(
        script=plan.script,
        arguments=redacted(plan.arguments),
        ranks=len(ranks),
        steps=steps,
        answer="unknown",
        findings=[],
        first_divergence=None,
        record_share=sum(rank.record_s for rank in ranks) / step_s if step_s else 0.0,
        folder=plan.out,
        notes=_notes(ranks, layout),
        command=command,
    )
    return _with_findings(results, findings)


def _of_rank_alone(finding: Finding) -> Finding:
    """Returns a finding about ranks that each train alone: what differs between them has no cause of its own."""
    if finding.answer != "differs":
        return finding
    return Finding(finding.question, "unknown", message("each_rank_trains_alone"))


def _of_evaluation_mode(finding: Finding) -> Finding:
    """Returns a finding of a training in evaluation mode, whose forward passes are taken for those of an evaluation."""
    if finding.question != "evaluation" or finding.answer == "right":
        return finding
    return Finding(finding.question, "unknown", message("trained_in_evaluation_mode"))


def _of_layout(layout: Layout, ranks: Ranks, record: Record, meant: str) -> list[Finding]:
    """Answers the questions that depend on what the ranks are to each other. meant: what the script is declared to
    be."""
    if layout.pipeline:
        return pipeline_findings(ranks, record, layout.pipeline, layout.stages, _stage_findings)
    if layout.tensors:
        return _divided_findings(ranks, layout.tensors, record)
    if layout.kind == "stages":
        return _stage_findings(layout.stages, record)
    if layout.kind == "other shapes":
        said = message("ranks_hold_other_shapes", parameter=layout.other_shape)
        return [*(Finding(question, "unknown", said) for question in OF_HAND), rates(ranks), schedule(ranks)]
    findings = [changed_alike(finding, ranks, record) for finding in _replica_findings(ranks, record)]
    if meant == "own_experts":
        return _unknown_by_hand(findings, [rank.rank for rank in ranks])
    if layout.kind == "replicas" and (apart := StepsApart.of(ranks, record, is_meant=bool(meant))):
        return _with_answers(findings, apart.findings())
    return _unknown_by_hand(findings, layout.pieces) if layout.kind == "by hand" else findings


def _with_answers(findings: Sequence[Finding], answers: Sequence[Finding]) -> list[Finding]:
    """Returns findings with other answers to some of the questions, in the same order; an answer to 'loss weight' falls
    away with the gradient that it is about."""
    asked: dict[Question, Finding] = {finding.question: finding for finding in answers}
    kept = [asked.pop(f.question, f) for f in findings if f.question != "loss weight" or f.question in asked]
    place = next(place for place, finding in enumerate(kept) if finding.question == "gradient") + 1
    return [*kept[:place], *asked.values(), *kept[place:]]


def with_replay(results: CheckResults, replay_findings: Sequence[Finding]) -> CheckResults:
    """Adds the answers of a replay. Where it could not be played, that is an answer, too, and the others stay."""
    replayed = next((finding.answer for finding in replay_findings if finding.question == "replayed gradient"), None)
    findings = [with_one_process(finding, replayed) for finding in with_effects(results.findings, replay_findings)]
    return _with_findings(results, [*findings, *replay_findings])


def without_by_hand(results: CheckResults, layout: ByHand, findings: Sequence[Finding]) -> CheckResults:
    """Returns results with the answers about a model that the script divides itself. Questions whose answers differ for
    such ranks are unknown where the answers leave them open."""
    answered = {finding.question for finding in findings}
    remaining = _unknown_by_hand(results.findings, layout.replicas[0])
    # The gradient of one process shows the weights of the losses.
    if any(finding.question == "replayed gradient" and finding.answer != "unknown" for finding in findings):
        remaining = [finding for finding in remaining if finding.question != "loss weight"]
    together = [*(finding for finding in remaining if finding.question not in answered), *findings]
    places = {finding.question: place for place, finding in reversed([*enumerate(results.findings)])}
    together.sort(key=lambda finding: places.get(finding.question, len(places)))
    return _with_findings(results, together)


def _unknown_by_hand(findings: Sequence[Finding], ranks: Sequence[int]) -> list[Finding]:
    said = message("layers_divided_by_hand", ranks=list(ranks))
    return [Finding(f.question, "unknown", said) if f.question in OF_HAND else f for f in findings]


def with_coefficients(results: CheckResults, ranks: Ranks, sources: Sources) -> CheckResults:
    """Takes factors of the losses that the source has as numbers for coefficients, which they may be."""
    return _with_findings(results, without_coefficients(results.findings, ranks, sources))


def with_sites(results: CheckResults, ranks: Ranks, sources: Sources, folder: PurePath) -> CheckResults:
    """Adds the lines of the user's code where each finding arises, and those to write instead.

    sources: the files that they are in. folder: which a patch's name of a file is relative to.
    """
    found_ids = {finding.message.id for finding in results.findings}
    added = [finding for finding in uncalled_code(ranks, sources) if finding.message.id not in found_ids]
    findings = located(with_schedules([*results.findings, *added], ranks, sources), ranks, sources)
    return replace(
        _with_findings(results, findings),
        findings=[_with_patch(finding, ranks, sources, folder) for finding in findings],
    )


def _with_patch(finding: Finding, ranks: Ranks, sources: Sources, folder: PurePath) -> Finding:
    patch = patch_of(finding, ranks, sources)
    return replace(finding, patch=patch.diff(folder)) if patch else finding


def first_divergence(findings: Sequence[Finding]) -> Divergence | None:
    """Returns the divergence of the earliest step; of several in one step, that of the earliest question."""
    divergences = [finding.divergence for finding in findings if finding.divergence]
    return min(divergences, key=lambda divergence: divergence.order, default=None)


def _with_findings(results: CheckResults, findings: Sequence[Finding]) -> CheckResults:
    """Returns results with these findings, and with the answer that follows from them."""
    right = {finding.question for finding in findings if finding.answer == "right"}
    shares_out = any(
        note.id == "ranks_compute_together" or (note.id == "layout_of_ranks" and note.fields.get("tensor"))
        for note in results.notes
    )
    was_interrupted = any(_is_interrupted(finding) for finding in findings)
    # Only one process tells whether ranks that compute pieces compute the whole.
    needed = (*NEEDED, ("replayed gradient",)) if shares_out or was_interrupted else NEEDED
    missing = [questions[0] for questions in needed if not right.intersection(questions)]
    answer: Answer = "unknown" if missing else "right"
    if any(finding.answer == "differs" for finding in findings):
        answer = "differs"
    return replace(
        results,
        findings=with_remedies(findings),
        answer=answer,
        missing=missing,
        first_divergence=first_divergence(findings),
    )


def _is_interrupted(finding: Finding) -> bool:
    why = finding.message.fields.get("why")
    return finding.question == "replay" and isinstance(why, Message) and why.id == "replay_was_interrupted"


def _notes(ranks: Ranks, layout: Layout) -> list[Message]:
    notes = layout.described(ranks)
    if layout.kind == "replicas" and compute_together(ranks):
        notes.append(message("ranks_compute_together"))
    for note in (note for rank in ranks for note in rank.notes):
        is_known = note in notes or (note.id == ON_CPUS and any(other.id == ON_CPUS for other in notes))
        if not is_known:
            notes.append(note)
    notes += [message("steps_taken_alone", rank=rank.rank, steps=rank.alone) for rank in ranks if rank.alone]
    statistics = [name for name in ranks[0].buffers if name.rpartition(".")[2] in STATISTICS]
    apart = [name for name in statistics if len({rank.buffers.get(name) for rank in ranks}) > 1]
    return [*notes, message("statistics_of_each_rank", buffer=apart[0])] if apart else notes


def _replica_findings(ranks: Ranks, record: Record) -> list[Finding]:
    """Answers the questions about ranks that hold the same parameters."""
    findings = [initial_weights(ranks), rows(ranks), order(ranks), *gradient(ranks, record), clipping(ranks, record)]
    findings += [rates(ranks), schedule(ranks), weights(ranks), *untrained(ranks), updates(ranks, record)]
    findings += [randoms(ranks), evaluation(ranks), *own_values(ranks)]
    return findings


def _divided_findings(ranks: Ranks, layout: TensorLayout, record: Record) -> list[Finding]:
    """Answers the questions about ranks that share out a model: about the replicas, and about the ranks of each."""
    replicas, of_all = of_replicas(ranks, layout), ReplicaRecord(record.folder, ranks, layout)
    within = {finding.question: finding for finding in within_replicas(ranks, layout, of_all)}
    findings = []
    for finding in _replica_findings(replicas, of_all):
        if finding.question in within:
            findings.append(within.pop(finding.question))
            continue
        finding = changed_alike(of_layout(finding, ranks, layout, of_all, replicas), replicas, of_all)
        finding = _with_global_rank(finding, replicas)
        findings.append(with_replicas(finding, ranks, layout))
    findings = [rates(ranks) if finding.question == "rate" else finding for finding in findings]
    # Other rows give other gradients and weights: these are no findings of their own.
    if any(finding.message.id == OTHER_ROWS for finding in findings):
        findings = [
            finding if finding.question not in OF_OTHER_ROWS else _because_of_rows(finding) for finding in findings
        ]
    return findings


def _because_of_rows(finding: Finding) -> Finding:
    return Finding(finding.question, "unknown", message("ranks_compute_pieces_of_other_rows"))


# The stages of a pipeline: ranks that hold other parameters train no other rows, and each stage is judged by itself.


def _stage_findings(stages: Sequence[Ranks], record: Record) -> list[Finding]:
    """Asks each stage, and returns one answer to each question, in their order."""
    answers = [
        {finding.question: _with_global_rank(finding, stage) for finding in _replica_findings(stage, record)}
        for stage in stages
    ]
    with_loss = [number for number, stage in enumerate(stages) if any(map(has_loss, stage))]
    findings = []
    for question in dict.fromkeys(question for of_stage in answers for question in of_stage):
        asked = with_loss if with_loss and question in OF_THE_LOSS else range(len(stages))
        answered = [number for number in range(len(stages)) if question in answers[number]]
        of_stages = {n: answers[n][question] for n in [n for n in asked if n in answered] or answered}
        finding = _together(question, of_stages)
        if question == "gradient" and finding.answer == "right":
            finding = _scaled_apart(stages, record) or finding
        # A stage alone cannot tell whether a norm is that of the whole model.
        is_by_norm = finding.answer == "right" or finding.message.id == "clipped_by_another_norm"
        if question == "rows" and finding.answer == "right" and len(stages) > 1:
            finding = rows_along_stages(stages) or finding
        if question == "clipping" and is_by_norm and len(stages) > 1:
            finding = clipped_together(stages, record) or finding
        findings.append(finding)
    return findings


def _together(question: Question, findings: Mapping[int, Finding]) -> Finding:
    """Returns the gravest answer of the stages; where all are right, that of the first."""
    for answer in ("differs", "unknown", "warning"):
        for stage, finding in findings.items():
            if finding.answer == answer == "differs":
                return finding
            if finding.answer == answer:
                return replace(finding, message=message("stage_answers", stage=stage, answer=finding.message))
    stage, first = next(iter(findings.items()))
    if len(findings) == 1:
        return Finding(question, "right", message("stage_answers", stage=stage, answer=first.message))
    return Finding(question, "right", message("each_stage_answers", stages=len(findings), answer=first.message))


def _with_global_rank(finding: Finding, stage: Ranks) -> Finding:
    """Returns an answer with the number that a rank has among all; of no rank, that of the stage's first."""
    divergence = finding.divergence
    if divergence is None:
        return finding
    return replace(finding, divergence=replace(divergence, rank=stage[divergence.rank or 0].rank))


def _scaled_apart(stages: Sequence[Ranks], record: Record) -> Finding | None:
    """Finds a stage whose gradients are scaled otherwise than those of the first."""
    gradients = [StepGradients.read(record, stage, 0) for stage in stages]
    factors = [stage.factor * stage.size for stage in gradients if stage.names]
    for number, factor in enumerate(factors):
        if abs(factor / factors[0] - 1) > TOLD_APART:
            cause = message("stages_scale_gradients_apart", factor=factor, stage=number, first=factors[0])
            rank = stages[number][0].rank
            return differs("gradient", "factor", cause, step=0, rank=rank, expected=factors[0], found=factor)
    return None
