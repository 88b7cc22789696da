"""Judges whether two recordings moved their weights alike, and the tensors that follow: moving averages, BatchNorm's
statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from samestep.bounds import FIRST_STEP_APART, LAST_BIT, MADE_LARGE_BY_ADAM, WEIGHTS_APART
from samestep.errors import TrainingFailed
from samestep.judge.findings import Ranks, differs, digest
from samestep.judge.fit import Array, norm
from samestep.judge.frozen_weights import copies_that_stay
from samestep.judge.matching import matched
from samestep.judge.record_pair import RecordPair, shared_arrays
from samestep.judge.step_gradients import coarser_of, norm_of_all
from samestep.message import message
from samestep.records.findings import Finding, Question
from samestep.records.script import STATISTICS, UntrainedRecord
from samestep.records.script_plan import END, START

QUESTION: Question = "weights"


def weights(pair: RecordPair) -> Finding:
    """Compares the weights after each step, where these were recorded, else after the last one."""
    steps = [pair.steps_of_rank_0(number) for number in range(pair.steps)]
    apart = next((number for number, (first, second) in enumerate(steps) if first.weights != second.weights), None)
    if apart is None and steps[0][0].weights:
        return Finding(QUESTION, "right", message("weights_bitwise_the_same", steps=pair.steps))
    if all(pair.weights(0, before=True)):
        return _of_each_step(pair)
    if not pair.ends_together:
        said = message("records_end_apart_without_weights")
        if apart is not None:
            said = message("records_end_apart", step=pair.since + apart)
        return Finding(QUESTION, "unknown", said)
    return _at_the_end(pair)


def _of_each_step(pair: RecordPair) -> Finding:
    start, other_start = pair.weights(0, before=True)
    coarser, distance, largest = coarser_of(pair.first), 0.0, dict[str, Array]()
    for number in range(pair.steps):
        first, second = pair.weights(number)
        names = [name for name in shared_arrays(first, second) if name in start and name in other_start]
        if not names or len(names) < max(len(first), len(second)):
            return Finding(QUESTION, "unknown", message("no_common_weight_moves"))
        _add_gradients(largest, pair, number)
        # Rounding alone moves an element that no gradient has moved.
        moves = {name: _moved_by_gradients(name, first[name], largest) for name in names}
        moved = {name: (first[name] - start[name])[moves[name]] for name in names}
        off = {name: (first[name] - second[name])[moves[name]] for name in names}
        same_so_far = pair.begins_alike(number) and pair.distances[number] == 0
        share = FIRST_STEP_APART if same_so_far else WEIGHTS_APART
        bound = coarser * (share * norm_of_all(moved, names) + LAST_BIT * norm_of_all(first, names))
        if norm_of_all(off, names) > bound:
            name = max(names, key=lambda parameter: norm(off[parameter]))
            cause = message("same_gradient_other_weights" if same_so_far else "weights_move_apart")
            expected, found = (message("a_movement", norm=norm(after[name] - start[name])) for after in (first, second))
            what = "weights after the step"
            return differs(QUESTION, what, cause, step=number, tensor=name, expected=expected, found=found)
        distance = max(distance, norm_of_all(off, names) / (norm_of_all(moved, names) or 1.0))
    return Finding(QUESTION, "right", message("final_weights_are_close", steps=pair.steps, distance=distance))


def _add_gradients(largest: dict[str, Array], pair: RecordPair, number: int) -> None:
    """Keeps the largest gradient that each element has had, relative to the largest one of its step, with a step's
    gradients."""
    taken = pair.taken(number)[0]
    top = max((float(abs(array).max(initial=0.0)) for array in taken.values()), default=0.0) or 1.0
    for name, array in taken.items():
        share = abs(array) / top
        largest[name] = np.maximum(largest[name], share) if name in largest else share


def _moved_by_gradients(name: str, weight: Array, largest: Mapping[str, Array]) -> np.ndarray:
    if name not in largest or largest[name].shape != weight.shape:
        return np.ones(weight.shape, dtype=bool)
    return np.asarray(largest[name] > MADE_LARGE_BY_ADAM)


def _at_the_end(pair: RecordPair) -> Finding:
    try:
        start = pair.second_record.arrays(START)
        first, second = (record.arrays(END) for record in (pair.first_record, pair.second_record))
    except TrainingFailed:
        return Finding(QUESTION, "unknown", message("weights_not_kept"))
    start, second = (
        {pair.names.get(name, name): array for name, array in arrays.items()} for arrays in (start, second)
    )
    names = [name for name in shared_arrays(first, second) if name in start]
    moved = norm_of_all({name: first[name].astype(float) - start[name] for name in names}, names)
    if not names or not moved:
        return Finding(QUESTION, "unknown", message("no_common_weight_moves"))
    off = {name: first[name].astype(float) - second[name] for name in names}
    distance, bound = norm_of_all(off, names) / moved, WEIGHTS_APART * coarser_of(pair.first)
    if not distance <= bound:
        return differs(
            QUESTION,
            "weights",
            message("final_weights_differ"),
            step=pair.since + pair.steps - 1,
            tensor=max(names, key=lambda name: norm(off[name])),
            expected=message("at_most_of_the_movement", bound=bound),
            found=round(distance, 6),
        )
    return Finding(QUESTION, "right", message("final_weights_are_close", steps=pair.steps, distance=distance))


def averages(pair: RecordPair) -> list[Finding]:
    """Compares moving averages, queues and frozen networks after each step, as long as the weights are the same to the
    last bit, or these are close."""
    question: Question = "frozen weights"
    first, names = pair.first[0].untrained, _matched_untrained(pair)
    if not names:
        return []
    before: dict[str, Array] = {}
    close = False
    for number in range(pair.steps):
        changed = [step.changed for step in pair.steps_of_rank_0(number)]
        values = pair.averages(number)
        apart = [name for name, second_name in names.items() if changed[0].get(name) != changed[1].get(second_name)]
        close |= bool(apart)
        apart = [name for name in apart if not _is_close(name, names[name], values, before)]
        before |= values[0]
        if apart and number > pair.same_bits:
            return [Finding(question, "unknown", message("averages_not_compared", step=number))]
        if apart:
            digests = [changed[0].get(apart[0]), changed[1].get(names[apart[0]])]
            expected, found = (message("stays_as_it_was") if value is None else digest(value) for value in digests)
            cause = message("same_weights_other_average", network=first[apart[0]].network)
            what = "frozen weights after the step"
            return [differs(question, what, cause, step=number, tensor=apart[0], expected=expected, found=found)]
    stay = sorted({*copies_that_stay(pair.first)} & {*copies_that_stay(pair.second)}) or None
    if close:
        return [Finding(question, "right", message("averages_are_close", networks=stay))]
    return [Finding(question, "right", message("averages_are_the_same", networks=stay))]


def is_seen_by_losses(finding: Finding, pair: RecordPair) -> bool:
    """Returns whether the tensor that differs belongs to a network that is changed before the forward pass of its step
    uses it, as a teacher may be: the loss of that step then differs for this reason."""
    divergence = finding.divergence
    if finding.question != "frozen weights" or divergence is None or divergence.step is None or not divergence.tensor:
        return False
    record = pair.first[0].untrained[divergence.tensor]
    return record.called and record.network not in pair.steps_of_rank_0(divergence.step)[0].early


def _is_close(
    name: str, second_name: str, values: tuple[Mapping[str, Array], Mapping[str, Array]], before: Mapping[str, Array]
) -> bool:
    """Returns whether a tensor with other bits is within rounding, and within a hundredth of its movement since it last
    changed."""
    first, second, last = values[0].get(name), values[1].get(second_name), before.get(name)
    if first is None or second is None or last is None or first.shape != second.shape:
        return False
    return norm(first - second) <= WEIGHTS_APART * norm(first - last) + LAST_BIT * norm(first)


def _matched_untrained(pair: RecordPair) -> dict[str, str]:
    """Matches the tensors that no optimizer moves, by their first values or their names. Returns the name in the
    first recording -> the name in the second. Tensors that begin with the same values are told apart by their later
    values."""
    first, second = (ranks[0].untrained for ranks in (pair.first, pair.second))
    starts = ({name: record.start for name, record in untrained.items()} for untrained in (first, second))
    names = matched(next(starts), next(starts), _histories(pair.first, first), _histories(pair.second, second))
    return {
        name: second_name
        for second_name, name in names.items()
        if name in first and (name == second_name or first[name].start == second[second_name].start)
    }


def _histories(ranks: Ranks, untrained: Mapping[str, UntrainedRecord]) -> dict[str, Array]:
    """Returns name -> a number for each step: tensors that have changed alike have the same numbers."""
    steps = ranks[0].steps
    return {name: np.array([float(step.changed.get(name, 0)) for step in steps]) for name in untrained}


def buffers(pair: RecordPair) -> list[Finding]:
    """Compares BatchNorm's statistics after the first step."""
    question: Question = "buffers"
    first, second = (_statistics(ranks) for ranks in (pair.first, pair.second))
    if not first or len(first) != len(second):
        return []
    if sorted(first.values()) == sorted(second.values()):
        return [Finding(question, "right", message("statistics_are_the_same", buffers=len(first)))]
    if not pair.same_bits:
        return [Finding(question, "unknown", message("statistics_not_compared"))]
    pairs: Sequence[tuple[str, int, int]] = [
        (name, value, second.get(name, second_value))
        for (name, value), second_value in zip(first.items(), second.values())
    ]
    name, value, second_value = next((entry for entry in pairs if entry[1] != entry[2]), pairs[0])
    cause = message("same_rows_other_statistics")
    what = "buffer after the step"
    return [differs(question, what, cause, step=0, tensor=name, expected=digest(value), found=digest(second_value))]


def _statistics(ranks: Ranks) -> dict[str, int]:
    return {name: value for name, value in ranks[0].buffers.items() if name.rpartition(".")[2] in STATISTICS}
