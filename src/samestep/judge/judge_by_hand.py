"""Judges a script that divides its model itself, once a replay has shown how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from samestep.judge.against_one_process import not_replayed, replayed_rates, replayed_weights
from samestep.judge.beside_steps import randoms
from samestep.judge.by_hand import Division, draw_apart
from samestep.judge.by_hand_gradients import replayed_gradients
from samestep.judge.clipping import clipped_apart
from samestep.judge.copies import Copies, CopiesApart, copies_apart, copies_drift_apart
from samestep.judge.evaluation import evaluation
from samestep.judge.findings import Ranks, differs
from samestep.judge.frozen_weights import untrained
from samestep.judge.rows import order, other_rows_within, rows
from samestep.judge.same_pieces import Unclipped, loss_weights_of_slices
from samestep.judge.step_gradients import coarser_of
from samestep.judge.updates import rates, schedule, updates
from samestep.message import message
from samestep.records.findings import Finding, Question
from samestep.records.record import Record
from samestep.records.script import ScriptRecord
from samestep.records.script_plan import ReplayRecord

DRIFT = "replica_drifts_apart"


def by_hand_findings(
    division: Division,
    ranks: Ranks,
    one_process: ScriptRecord,
    result: ReplayRecord,
    *,
    record: Record,
    replay: Record,
    told_ranks: int,
    unclipped: Callable[[], Unclipped | None],
) -> list[Finding]:
    """Answers the questions about ranks that share out a model which the script divides itself.

    unclipped: plays the first step once more, and returns its gradients before anything clips them.
    """
    findings = held_findings(division, ranks, record)
    if _other_rows(division, ranks):
        return findings
    # The replay has begun with the weights of one rank, which are not those of the others.
    if any(finding.message.id == "replica_begins_apart" for finding in findings):
        return [*findings, not_replayed(message("ranks_differ_by_themselves"))]
    readers = [ranks[rank] for rank in division.layout.read]
    gradients = replayed_gradients(
        division,
        ranks,
        one_process,
        record=record,
        replay=replay,
        told_ranks=told_ranks,
        gathers_cut=result.gathers_cut,
    )
    weights = list[Finding]()
    # The replay is told the same number of ranks, so that it repeats the script's use of it: the losses tell.
    if told_ranks > 1 and (division.axis == "tensor" or told_ranks == len(ranks)):
        weights = loss_weights_of_slices(division.layout, division.axis, ranks, record)
    if told_ranks == len(ranks) > division.layout.size:
        # Where the script clips, its gradients do not show the factor.
        if weights and weights[0].answer == "unknown" and gradients[0].answer == "right" and (found := unclipped()):
            weights = loss_weights_of_slices(division.layout, division.axis, ranks, record, found)
        gradients = _of_alike_replicas(gradients, weights, result, told_ranks)
    is_right = gradients[0].answer == "right"
    if is_right:
        gradients.insert(0, Finding("gradient", "right", message("each_rank_has_its_part", axis=division.axis)))
    findings = [_after_gradients(finding, gradients) for finding in findings]
    findings, gradients = clipping_once(findings, gradients)
    findings += [*gradients, *untrained(readers), evaluation(readers)]
    findings += [updates([ranks[rank] for rank in division.layout.same(0)], record), randoms(readers), *weights]
    findings.append(_rates(result, ranks, one_process, told_ranks))
    if is_right:
        findings.append(replayed_weights(result, len(one_process.steps), coarser_of(ranks)))
    return findings


def _of_alike_replicas(
    gradients: list[Finding], weights: list[Finding], result: ReplayRecord, told_ranks: int
) -> list[Finding]:
    """Returns what a replay tells in which the only rank stood for all replicas: the factor by which gradients are
    scaled that are added up over them is the ranks' own there, so that it is known from their losses alone."""
    said = message("replay_told_of_all_ranks", ranks=told_ranks)
    if gradients[0].answer == "right" and not any(finding.answer in ("right", "differs") for finding in weights):
        return [Finding("replayed gradient", "unknown", said)]
    # Such a sum counts a tensor once for each rank of a replica that holds it, and each piece once.
    if result.adds_numbers and gradients[0].question == "clipping":
        return [Finding("clipping", "unknown", said)]
    return gradients


def clipping_once(findings: list[Finding], gradients: list[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Returns findings of which one answers how gradients are clipped: the replay's, unless it does not know."""
    held = any(finding.question == "clipping" for finding in findings)
    if held and any(finding.question == "clipping" and finding.answer != "unknown" for finding in gradients):
        return [finding for finding in findings if finding.question != "clipping"], gradients
    if held:
        return findings, [finding for finding in gradients if finding.question != "clipping"]
    return findings, gradients


def _rates(result: ReplayRecord, ranks: Ranks, one_process: ScriptRecord, told_ranks: int) -> Finding:
    """Compares the rates with one process's; those that may depend on a number which it was told are unknown."""
    finding = replayed_rates(result, ranks, one_process, told_ranks if told_ranks > 1 else len(ranks))
    if told_ranks < len(ranks) or finding.answer != "right":
        return finding
    return replace(finding, answer="unknown", message=message("replay_told_of_all_ranks", ranks=told_ranks))


def _after_gradients(finding: Finding, gradients: Sequence[Finding]) -> Finding:
    """Returns a finding; unknown where weights differ between ranks whose gradients differed before."""
    steps = [found.divergence.order for found in gradients if found.divergence]
    if not steps or not finding.divergence or finding.message.id != DRIFT or finding.divergence.order < min(steps):
        return finding
    return Finding(finding.question, "unknown", message("gradients_came_apart_before"))


def held_findings(division: Division, ranks: Ranks, record: Record) -> list[Finding]:
    """Answers the questions that the ranks' records can answer once the part of each rank is known, even without a
    replay; none where it is not known."""
    if not division.held:
        return []
    readers = [ranks[rank] for rank in division.layout.read]
    apart = _other_rows(division, ranks)
    clipped = clipped_apart(division.layout, division.axis, ranks, record)
    of_rows = [apart] if apart else _rows(division, readers)
    weights = [
        _of_known(finding, division, ranks)
        for finding in (_initial_weights(division, ranks), _weights(division, ranks))
    ]
    of_weights = [rates(ranks), schedule(ranks), weights[1]]
    return [weights[0], *of_rows, *([clipped] if clipped else []), *of_weights]


def _rows(division: Division, readers: Sequence[ScriptRecord]) -> list[Finding]:
    """Answers about rows: those of the ranks that read other ones."""
    found = [rows(readers), order(readers)]
    if not division.layout.shares_rows or found[0].answer != "right":
        return found
    if division.axis == "expert":
        return [_same_rows(division), found[1]]
    between = found[0].message if len(readers) > 1 else None
    said = message("replica_reads_one_batch", axis=division.axis, between=between)
    return [replace(found[0], message=said), found[1]]


def _same_rows(division: Division) -> Finding:
    """Returns that ranks which send their rows to each other's experts train the same ones."""
    size = division.layout.size
    cause = message("replicas_train_the_same_rows", axis="expert", replicas=size)
    expected, found = message("other_rows"), message("rows_of_rank", rank=division.layout.replicas[0][0])
    rank = division.layout.replicas[0][1]
    return differs("rows", "rows along expert", cause, step=0, rank=rank, expected=expected, found=found)


def _other_rows(division: Division, ranks: Ranks) -> Finding | None:
    """Finds ranks of a replica that compute pieces of a layer on other rows than its first rank."""
    layout = division.layout
    if division.axis != "tensor" or layout.shares_rows:
        return None
    replica, replicas = layout.replicas[0], len(layout.replicas)
    return other_rows_within(replica, replica[1], axis=division.axis, data_axis="data", replicas=replicas, step=0)


# Tensors that several ranks hold


def _of_known(finding: Finding, division: Division, ranks: Ranks) -> Finding:
    """Returns a finding about what the ranks hold; where it is right of a part of it alone, which part was not judged:
    a replay may end before all parameters are put together, and frozen ones are not."""
    known = {(division.layout.like(rank), name) for same in _copies(division) for rank, name in same.holders}
    held = [(rank.rank, name) for rank in ranks for name in rank.shapes]
    left = [name for rank, name in held if (division.layout.like(rank), name) not in known]
    left += [name for name, value in ranks[0].start.items() if "(frozen)" in name and _is_apart(name, value, ranks)]
    if finding.answer != "right" or not left:
        return finding
    names = [*dict.fromkeys(left)]
    said = message("right_of_known_weights", answer=finding.message, left=len(names), parameter=names[0])
    return Finding(finding.question, "unknown", said)


def _is_apart(name: str, value: int, ranks: Ranks) -> bool:
    return any(rank.start.get(name) != value for rank in ranks)


def _copies(division: Division) -> list[Copies]:
    """Returns the copies of each piece of a parameter of one process."""
    copies = list[Copies]()
    for name, pieces in division.held.items():
        same: dict[tuple[int, int], list[tuple[int, str]]] = {}
        for piece in pieces:
            ranks = division.layout.same(piece.rank)
            same.setdefault((piece.dimension, piece.start), []).extend((rank, piece.name) for rank in ranks)
        copies += [Copies(name, sorted(holders)) for holders in same.values()]
    return copies


def _axis(division: Division, apart: CopiesApart) -> str:
    """Returns the axis along which copies are apart: 'data' between ranks of the same place in their replicas."""
    (first, _), *other_holders = apart.copies.holders
    other_rank = next(rank for (rank, _), value in zip(other_holders, apart.digests[1:]) if value != apart.digests[0])
    return "data" if division.layout.like(other_rank) == division.layout.like(first) else division.axis


def _initial_weights(division: Division, ranks: Ranks) -> Finding:
    """Judges whether ranks that hold the same begin with the same, and those that hold other pieces with others."""
    question: Question = "initial weights"
    if apart := copies_apart(_copies(division), ranks, step=None):
        axis = _axis(division, apart)
        cause = message("replica_begins_apart", axis=axis, different=apart.different, plan=None)
        return apart.finding(cause, along=axis)
    if repeated := _repeated(division, ranks):
        cause = message("pieces_begin_alike", axis=division.axis, parameter=repeated)
        return differs(
            question,
            f"initial weights along {division.axis}",
            cause,
            tensor=repeated,
            rank=division.layout.replicas[0][1],
            expected=message("another_piece_on_each_rank"),
            found=message("the_same_piece"),
        )
    return Finding(question, "right", message("copies_begin_alike", axis=division.axis))


def _repeated(division: Division, ranks: Ranks) -> str | None:
    """Returns a matrix whose pieces are the same on all ranks of a replica: drawn from one seed."""
    for name, pieces in division.held.items():
        if len(pieces) < 2 or pieces[0].dimension < 0:
            continue
        first = ranks[pieces[0].rank]
        is_drawn = len(first.shapes.get(pieces[0].name, ())) > 1 and pieces[0].name not in first.uniform
        starts = {ranks[piece.rank].start.get(piece.name) for piece in pieces}
        if is_drawn and len(starts) == 1 and None not in starts:
            return name
    return None


def _weights(division: Division, ranks: Ranks) -> Finding:
    """Judges whether ranks that hold the same have the same after each step."""
    apart = copies_drift_apart(_copies(division), ranks)
    if apart is None:
        return Finding("weights", "right", message("copies_stay_alike", axis=division.axis))
    axis = _axis(division, apart)
    cause = message("replica_drifts_apart", axis=axis)
    # Dropout has dropped other elements of an activation that each rank has whole.
    if axis == "tensor" and draw_apart(division.layout, ranks):
        cause = message("replica_draws_apart", axis=axis, step=apart.step)
    return apart.finding(cause, along=axis)
