"""Prints the results of `samestep check`: a line a question, and the first divergence with its cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from samestep.message import Message, message
from samestep.records.call_site import CallSite
from samestep.records.findings import Answer, CheckResults, DiffResults, Finding, FixRecord, Question
from samestep.records.results import Divergence
from samestep.records.script import ON_CPUS
from samestep.report.language import text
from samestep.report.terminal import cell, terminal

STYLES = {"right": "green", "differs": "bold red", "unknown": "yellow", "warning": "bold yellow"}
ANSWERS: Mapping[Answer, Message] = {
    "right": message("answer_right"),
    "differs": message("answer_differs"),
    "unknown": message("answer_unknown"),
    "warning": message("answer_warning"),
}
QUESTIONS: Mapping[Question, Message] = {
    "steps": message("question_steps"),
    "initial weights": message("question_initial_weights"),
    "rows": message("question_rows"),
    "order": message("question_order"),
    "gradient": message("question_gradient"),
    "loss weight": message("question_loss_weight"),
    "clipping": message("question_clipping"),
    "rate": message("question_rate"),
    "schedule": message("question_schedule"),
    "weights": message("question_weights"),
    "frozen weights": message("question_frozen_weights"),
    "updates": message("question_updates"),
    "random numbers": message("question_random_numbers"),
    "evaluation": message("question_evaluation"),
    "evaluation values": message("question_evaluation_values"),
    "buffers": message("question_buffers"),
    "collectives": message("question_collectives"),
    "saves": message("question_saves"),
    "replay": message("question_replay"),
    "replayed gradient": message("question_replayed_gradient"),
    "replayed rate": message("question_replayed_rate"),
    "replayed weights": message("question_replayed_weights"),
    "replayed micro-batches": message("question_replayed_micro_batches"),
    "micro-batches": message("question_micro_batches"),
    "precision": message("question_precision"),
    "loss": message("question_loss"),
    "settings": message("question_settings"),
}
# The quantity of a divergence -> how it is called. judge says which there are.
QUANTITIES: Mapping[str, Message] = {
    "calls of the closure": message("quantity_calls_of_the_closure"),
    "optimizer steps": message("quantity_optimizer_steps"),
    "process group": message("quantity_process_group"),
    "mode": message("quantity_mode"),
    "initial weights": message("quantity_initial_weights"),
    "parameters": message("quantity_parameters"),
    "rows": message("quantity_rows"),
    "rows of all ranks": message("quantity_rows_of_all_ranks"),
    "gradient": message("quantity_gradient"),
    "weight of a target": message("quantity_weight_of_a_target"),
    "total weight of the losses": message("quantity_total_weight_of_the_losses"),
    "clipping": message("quantity_clipping"),
    "factor": message("quantity_factor"),
    "learning rate": message("quantity_learning_rate"),
    "advances of the schedule": message("quantity_advances_of_the_schedule"),
    "weights": message("quantity_weights"),
    "weights after the step": message("quantity_weights_after_the_step"),
    "frozen weights after the step": message("quantity_frozen_weights_after_the_step"),
    "buffer after the step": message("quantity_buffer_after_the_step"),
    "update": message("quantity_update"),
    "collective": message("quantity_collective"),
    "gradient against one process": message("quantity_gradient_against_one_process"),
    "clipped gradient against one process": message("quantity_clipped_gradient_against_one_process"),
    "weights against one process": message("quantity_weights_against_one_process"),
    "micro-batches of a step": message("quantity_micro_batches_of_a_step"),
    "dtypes": message("quantity_dtypes"),
    "limit of clipping": message("quantity_limit_of_clipping"),
    "loss": message("quantity_loss"),
    "setting of the optimizer": message("quantity_setting_of_the_optimizer"),
    "setting of the schedule": message("quantity_setting_of_the_schedule"),
    "gradient before clipping": message("quantity_gradient_before_clipping"),
    "reported value": message("quantity_reported_value"),
    "calls of set_epoch": message("quantity_calls_of_set_epoch"),
}


def show_check(results: CheckResults) -> None:
    """Prints the answers and the verdict on stdout."""
    _say_where(results.notes)
    _show(results.findings, lines(results))


def _say_where(notes: Sequence[Message]) -> None:
    """Prints first that CPUs have computed what a script computes on GPUs."""
    for note in notes:
        if note.id == ON_CPUS:
            terminal(100).show_line(text(note))


def _other_notes(notes: Sequence[Message]) -> list[Message]:
    return [message("note", note=note) for note in notes if note.id != ON_CPUS]


def show_diff(results: DiffResults) -> None:
    """Prints what is the same in two records, and where they part."""
    _say_where(results.notes)
    said = _other_notes(results.notes)
    paths = {"first": results.first, "second": results.second}
    lines_of_sides: list[str] = []
    if results.first_divergence:
        said += _divergence(message("second_against_first", **paths), results.first_divergence)
        found = next(finding for finding in results.findings if finding.divergence == results.first_divergence)
        lines_of_sides = [
            *_places(found, found.expected_sites),
            *_places(found),
            *_changes(results, message("changed_lines_nearest")),
        ]
    elif results.answer == "right":
        after = results.resumed_at - 1 if results.resumed_at else None
        said.append(message("second_took_the_steps", steps=results.steps, after=after, **paths))
        if any(finding.message.id == "gradients_are_close" for finding in results.findings):
            lines_of_sides = _changes(results, message("changed_lines_within_rounding"))
    else:
        said.append(message("comparison_unknown"))
    if results.folder:
        lines_of_sides.append(text(message("records_of_both_sides", folder=results.folder)))
    _show(results.findings, ["", *map(text, said), *lines_of_sides])


def _changes(results: DiffResults, what: Message) -> list[str]:
    """Returns the changed lines, those that are nearest to a first difference before the others."""
    shown_lines = [text(what)] if results.changes else []
    for place in results.changes:
        name = place.after or place.before
        shown_lines += [f"  {name}:{place.line}", *(f"    {line}" for line in place.text.splitlines())]
    if results.more_changes:
        shown_lines.append(text(message("more_changed_places", places=results.more_changes)))
    return shown_lines


def lines(results: CheckResults) -> list[str]:
    """Returns what differs, the cause before its effects, with the lines of the user's code; what was judged, what was
    not, and what that would take; and where the records are."""
    script = {"script": Path(results.script).name, "ranks": results.ranks}
    said = [*map(text, _other_notes(results.notes))]
    differing = _by_cause(results.findings, "differs")
    if results.first_divergence:
        said += map(text, _divergence(message("script_on_ranks", **script), results.first_divergence))
        said += [*_places(differing[0]), *_patch(differing[0])]
    for finding in [*differing[1:], *_by_cause(results.findings, "warning")]:
        question, answer = QUESTIONS[finding.question], ANSWERS[finding.answer]
        said.append(text(message("also_found", question=question, answer=answer, what=finding.message)))
        said += [*_places(finding), *_patch(finding)]
    said += map(text, _judged(results))
    if results.answer == "right":
        warnings = sum(finding.answer == "warning" for finding in results.findings)
        said.append(text(message("script_is_right", steps=results.steps, warnings=warnings or None, **script)))
    elif results.answer == "unknown":
        missing = [QUESTIONS[question] for question in results.missing]
        said.append(text(message("script_is_unknown", steps=results.steps, missing=missing, **script)))
    said += [line for fix in results.fixes for line in _fix(fix)]
    return ["", *said, text(message("records_are_in", folder=results.folder, share=results.record_share))]


def _by_cause(findings: Sequence[Finding], answer: Answer) -> list[Finding]:
    """Returns the findings with an answer: of the earliest step, and there in the order in which a step goes."""
    answered = [finding for finding in findings if finding.answer == answer]
    return sorted(answered, key=lambda finding: finding.divergence.order if finding.divergence else -1)


def _places(finding: Finding, sites: Sequence[CallSite] | None = None) -> list[str]:
    """Returns the lines of the user's code where a finding arises, relative to the working directory. sites: those of
    the other side of a comparison."""
    current_folder = Path.cwd()
    places = []
    for site in finding.sites if sites is None else sites:
        file = Path(site.file)
        path = file.relative_to(current_folder) if file.is_relative_to(current_folder) else file
        places.append(f"  {path}:{site.line}" + (f": {site.code}" if site.code else ""))
    return places


def _patch(finding: Finding) -> list[str]:
    """Returns the lines to write instead, without the names of the files."""
    changed = finding.patch.splitlines()[2:]
    return [text(message("write_instead")), *(f"  {line}" for line in changed)] if changed else []


def _fix(fix: FixRecord) -> list[str]:
    """Returns what the check of a patched copy says."""
    said = message("patched_copy_fails", copy=fix.copy)
    if fix.answer in ("right", "unknown") and not fix.left:
        said = message("patched_copy_is_right", copy=fix.copy, unknown=fix.answer == "unknown")
    elif fix.answer and fix.id in fix.left:
        said = message("patch_does_not_mend", copy=fix.copy)
    elif fix.answer:
        said = message("patched_copy_has_more", copy=fix.copy, left=len(fix.left))
    patch = [f"  {line}" for line in fix.patch.splitlines()]
    return [text(message("patch_was_tried", finding=fix.id)), *patch, text(said)]


def _judged(results: CheckResults) -> list[Message]:
    """Returns which questions were answered, and for each that was not, what it would take."""
    right = [QUESTIONS[finding.question] for finding in results.findings if finding.answer == "right"]
    said = [message("judged_right", questions=right)] if right else []
    for finding in results.findings:
        if finding.answer == "unknown":
            question = QUESTIONS[finding.question]
            said.append(message("not_judged", question=question, why=finding.message, remedy=finding.remedy))
    return said


def _show(findings: Sequence[Finding], texts: Sequence[str]) -> None:
    console = terminal(100)
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in ("question", "answer", "what was found"):
        table.add_column(overflow="fold")
    for finding in findings:
        answer = cell(text(ANSWERS[finding.answer]), STYLES[finding.answer])
        table.add_row(cell(text(QUESTIONS[finding.question])), answer, cell(text(finding.message)))
    console.print(table)
    for line in texts:
        console.show_line(line)


def _divergence(what: Message, first: Divergence) -> list[Message]:
    """Returns what differs first, where, and the usual cause."""
    differs = message(
        "differs_at",
        what=what,
        step=first.step,
        quantity=QUANTITIES.get(first.quantity, first.quantity),
        tensor=first.tensor,
        rank=first.rank,
        expected=_shown(first.expected),
        found=_shown(first.found),
    )
    return [differs, message("usual_cause", cause=first.cause)]


def _shown(value: Any) -> Any:
    """Returns an expected or found value with all its digits: the difference may be in the last one."""
    return value if isinstance(value, Message | list | tuple) else str(value)
