"""Finds where the first training forward of the ranks first differs from that of one process: in a module, or in the
loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from samestep.bounds import LOSS_APART_OF_PIECES, LOSS_WEIGHT_APART, MODULE_SUMS_APART, MODULE_SUMS_LEAST
from samestep.judge.findings import Ranks, module_name
from samestep.judge.losses import losses_of
from samestep.judge.step_gradients import coarser_of
from samestep.message import Message, message
from samestep.records.findings import Finding
from samestep.records.script import LossRecord, ScriptRecord

# Findings that a module which computes something else may cause, on the ranks of a replica or against one process.
OF_A_MODULE = ("replica_gradient_apart", "replica_is_no_one_process", "later_gradients_apart")

# Findings of the replay about a gradient that is not one process's, where it knows no mistake.
UNEXPLAINED = ("loss_depends_on_ranks", "mean_of_rank_means_or_a_term")


def with_places(findings: Sequence[Finding], ranks: Ranks, one_process: ScriptRecord) -> list[Finding]:
    """Returns the findings: those that name no mistake get the place where the difference begins, and findings about
    weights are left out where they follow from a gradient that cannot be judged."""
    placed = [_with_place(finding, ranks, one_process) for finding in findings]
    if not any(finding.message.id == "loss_normalises_own_rows" for finding in placed):
        return placed
    said = message("gradients_came_apart_before")
    return [Finding(f.question, "unknown", said) if f.question == "replayed weights" else f for f in placed]


def _with_place(finding: Finding, ranks: Ranks, one_process: ScriptRecord) -> Finding:
    """Returns a finding about gradients of ranks that read other rows; where it names no mistake, with the place in the
    first step at which the ranks together first differ from one process, if that is known."""
    divergence = finding.divergence
    if finding.message.id not in UNEXPLAINED or divergence is None or divergence.step != 0:
        return finding
    cause = _first_place(ranks, one_process)
    if cause is None:
        return finding
    if cause.id == "loss_of_same_outputs_apart" and any(rank.steps[0].own_statistics for rank in ranks):
        figures = {"found": cause.fields["found"], "expected": cause.fields["expected"]}
        return Finding(finding.question, "unknown", message("loss_normalises_own_rows", **figures))
    # Means over different numbers of targets give another loss for the same outputs, too.
    if cause.id == "loss_of_same_outputs_apart" and _counts_apart(ranks):
        return finding
    return replace(finding, message=cause, divergence=replace(divergence, cause=cause))


def _counts_apart(ranks: Ranks) -> bool:
    """Returns whether means on some ranks are over more rows or targets than on others."""
    terms = [
        [(term.count, len(batch.rows)) for batch in rank.steps[0].micro_batches for term in batch.losses]
        for rank in ranks
    ]
    return any(of_rank != terms[0] for of_rank in terms)


def _first_place(ranks: Ranks, one_process: ScriptRecord) -> Message | None:
    """Returns where the ranks together first differ from one process; None where that is not known."""
    near = MODULE_SUMS_APART * coarser_of(ranks)
    for module, parts, whole_sums in _calls(ranks, one_process):
        given, returned = (_are_together(*pair, near) for pair in zip(parts, whole_sums))
        if given is False:
            return message("module_is_given_otherwise", module=module_name(module))
        if given and returned is False:
            return message("module_depends_on_ranks", module=module_name(module))
        if not (given and returned):
            return None
    if not one_process.modules:
        return None
    of_ranks, of_one = [_terms(rank) for rank in ranks], _terms(one_process)
    if {len(terms) for terms in of_ranks} != {len(of_one)}:
        return None
    for number, term in enumerate(of_one):
        found = sum(terms[number].count for terms in of_ranks)
        if term.classes and all(terms[number].count for terms in of_ranks) and found != term.count:
            return message("targets_of_ranks_apart", found=found, expected=term.count, ranks=len(ranks))
    losses = losses_of([*ranks, one_process], 0)
    known = [loss for loss in losses if loss is not None]
    if len(known) < len(losses):
        return None
    found_loss, expected = sum(known[:-1]) / len(ranks), known[-1]
    if abs(found_loss - expected) <= LOSS_APART_OF_PIECES * coarser_of(ranks) * abs(expected):
        return None
    weight = next((term.weight for number, term in enumerate(of_one) if _is_undivided(of_ranks, term, number)), None)
    return message("loss_of_same_outputs_apart", found=found_loss, expected=expected, weight=weight, ranks=len(ranks))


def _terms(rank: ScriptRecord) -> list[LossRecord]:
    return [term for batch in rank.steps[0].micro_batches for term in batch.losses]


def _is_undivided(of_ranks: Sequence[Sequence[LossRecord]], term: LossRecord, number: int) -> bool:
    """Returns whether a term of the loss adds up more values in one process, those of all ranks, and enters with the
    same factor on each rank as there. A penalty on the weights adds up as many on each rank."""
    weights = {terms[number].weight for terms in of_ranks}
    is_of_rows = term.count > 0 and sum(terms[number].count for terms in of_ranks) == term.count
    return (
        is_of_rows
        and term.reduction == "sum"
        and all(abs(weight - term.weight) <= LOSS_WEIGHT_APART * abs(weight) for weight in weights)
    )


def with_module(finding: Finding, ranks: Ranks, one_process: ScriptRecord, axis: str, size: int) -> Finding:
    """Returns a finding about gradients; where a module computes something else on the `size` ranks along an axis, with
    that as its cause."""
    if finding.message.id not in OF_A_MODULE:
        return finding
    if (module := first_module_apart(ranks, one_process)) is not None:
        cause = message("module_computes_otherwise", axis=axis, module=module_name(module), ranks=size)
    elif finding.message.id == "replica_is_no_one_process" and (losses := _losses_of_whole_outputs(ranks, one_process)):
        cause = message("loss_of_whole_outputs_apart", axis=axis, ranks=size, found=losses[0], expected=losses[1])
    else:
        return finding
    divergence = replace(finding.divergence, cause=cause) if finding.divergence else None
    return replace(finding, message=cause, divergence=divergence)


def _losses_of_whole_outputs(ranks: Ranks, one_process: ScriptRecord) -> tuple[float, float] | None:
    """Returns (a rank's loss, one process's), where they differ though each rank has the whole output of the model, as
    one process has it; None where it is otherwise, or not known."""
    outputs = [rank.modules[-1].returned for rank in ranks if rank.modules]
    whole_output = one_process.modules[-1].returned if one_process.modules else None
    *losses, expected = losses_of([*ranks, one_process], 0)
    known = [loss for loss in losses if loss is not None]
    if (
        whole_output is None
        or not whole_output.count
        or len(outputs) < len(ranks)
        or len(known) < len(ranks)
        or expected is None
    ):
        return None
    pairs = [((output.count, output.sums), (whole_output.count, whole_output.sums)) for output in outputs]
    coarser = coarser_of(ranks)
    is_same = all(_are_together([found], wanted, MODULE_SUMS_APART * coarser) for found, wanted in pairs)
    one_loss = max(known) - min(known) <= LOSS_APART_OF_PIECES * coarser * abs(expected)
    apart = abs(known[0] - expected) > LOSS_APART_OF_PIECES * coarser * abs(expected)
    return (known[0], expected) if is_same and one_loss and apart else None


def first_module_apart(ranks: Ranks, one_process: ScriptRecord) -> str | None:
    """Returns the first module that was given what one process gives it, put together over the ranks, and returned
    something else; None where none has, or they cannot be told apart.

    A module that returns sums which are still to be added up over the ranks is right where one around it returns what
    one process does, and else the first.
    """
    partial, near = list[str](), MODULE_SUMS_APART * coarser_of(ranks)
    for module, parts, whole_sums in _calls(ranks, one_process):
        are_given, are_returned = (_are_together(*pair, near) for pair in zip(parts, whole_sums))
        if are_returned and whole_sums[1][0]:
            partial = [name for name in partial if not _is_inside(name, module)]
        if are_given and are_returned is False:
            if not _are_partial(parts[1], whole_sums[1], near):
                return next((name for name in partial if _is_inside(name, module)), module)
            partial.append(module)
    return partial[0] if partial else None


def _is_inside(name: str, module: str) -> bool:
    return name.startswith(f"{module}." if module else "") and name != module


Sums = tuple[int, list[float]]


def _calls(
    ranks: Ranks, one_process: ScriptRecord
) -> Iterator[tuple[str, tuple[list[Sums], list[Sums]], tuple[Sums, Sums]]]:
    """Yields (module, its inputs and outputs on each rank, the same in one process) for each call that all ranks and
    the one process have made."""
    of_ranks = [_by_call(rank) for rank in ranks]
    for call, whole_sums in _by_call(one_process).items():
        if all(call in of_rank for of_rank in of_ranks):
            given, returned = ([of_rank[call][side] for of_rank in of_ranks] for side in (0, 1))
            yield call[0], (given, returned), whole_sums


def _by_call(rank: ScriptRecord) -> dict[tuple[str, int], tuple[Sums, Sums]]:
    """Returns (module, the number of its call) -> its inputs and outputs."""
    calls = dict[tuple[str, int], tuple[Sums, Sums]]()
    for module in rank.modules:
        number = sum(name == module.name for name, _ in calls)
        sums = ((side.count, side.sums) for side in (module.given, module.returned))
        calls[module.name, number] = next(sums), next(sums)
    return calls


def _are_together(parts: Sequence[Sums], whole_sums: Sums, near: float) -> bool | None:
    """Returns whether the elements of all ranks are those of one process, each as often as there are copies; None where
    the elements are no whole number of copies. near: how far apart the same sums may be, relative."""
    count, sums = whole_sums
    total = sum(part[0] for part in parts)
    if not count and not total:
        return True
    if not count or total % count or total // count > len(parts):
        return None
    copies, size = total // count, max(sums[1], MODULE_SUMS_LEAST)
    added = [sum(values) / copies for values in zip(*(part[1] for part in parts))]
    are_near = abs(added[0] - sums[0]) <= near * size and abs(added[1] - sums[1]) <= near * size
    return bool(are_near and abs(added[2] - sums[2]) <= near * max(sums[2], MODULE_SUMS_LEAST))


def _are_partial(parts: Sequence[Sums], whole_sums: Sums, near: float) -> bool:
    """Returns whether the elements of one process are the sums over ranks of theirs, of which each has another part."""
    count, sums = whole_sums
    total = sum(part[0] for part in parts)
    size = max(sum(part[1][1] for part in parts), MODULE_SUMS_LEAST)
    is_sum = abs(sum(part[1][0] for part in parts) - sums[0]) <= near * size
    return bool(is_sum and total > count and any(part[1] != parts[0][1] for part in parts))
