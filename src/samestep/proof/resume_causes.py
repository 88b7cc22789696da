"""Names the usual cause of a continued training's difference from the one that was not interrupted."""

from __future__ import annotations

from typing import Any

from samestep.proof.trace import Trace
from samestep.records.results import Divergence


def state_cause(name: str, want: Any, got: Any, other: bool) -> str:
    """Returns the cause of a part of the state that another launch began with otherwise.

    name: 'position', or a part as in rank/observer. want, got: the steps of a position; sums of a tensor, or 'lost'.
    other: of a position, whether the state is another's too; of a tensor, whether there are other ranks.
    """
    if name == "position":
        if got == 0:
            return "the training began anew: no checkpoint was found, or its position was not restored"
        if other:
            return f"an older checkpoint was loaded, that of step {got}: not the newest one"
        return f"the position is off by {abs(got - want)}: batches are trained twice, or left out"
    kind, _, of = name.partition(" of ")
    part = name.partition(" [")[0].partition("[")[0].strip()
    lost = "was not restored" if got == "lost" else "began anew" if got == 0.0 else "is another than was saved"
    where = ", on the new number of ranks" if other else ""
    if want == "absent" and part == "evaluations":
        return "the evaluations so far are more than were saved: one is counted twice, and patience may end it early"
    if want == "absent":
        return f"{of} is a parameter of its own after loading: a tied weight was saved once, and loaded apart"
    if kind == "weights":
        return f"the weights of {of} are not those of the checkpoint's step{where}: rounded, of another step, or lost"
    if kind == "average":
        return f"the average of the weights {of} (EMA) {lost}{where}: averaging starts again from the weights"
    if name.startswith("buffer "):
        return f"the buffer {name.removeprefix('buffer ')} is not the rank's own{where}: not saved, or another rank's"
    if name.startswith("carried state"):
        return "the state that rows carry from step to step was lost: each row begins anew in the middle of an epoch"
    if of and kind == "step":
        return f"the optimizer's step count of {of} {lost}: Adam corrects its bias as at the beginning"
    if of:
        return f"the optimizer's {kind} of {of} {lost}{where}"
    if part == "evaluations":
        return "the evaluations so far were not restored: the best one is forgotten, and patience counts anew"
    if part == "scaler":
        return "the loss scaler was not restored: it begins again from its first scale"
    counts = "" if got in ("lost", 0.0) else ": not restored, or a step was counted twice"
    return f"the state of the {part.replace('_', ' ')} {lost}{counts}"


def resume_cause(divergence: Divergence, cut: int, expected: Trace, observed: Trace, draws: bool) -> str:
    """Returns the cause of a difference after the interruption, where the state was restored; '' where none is known.

    cut: the steps before the interruption. draws: whether the model draws random numbers.
    """
    step = cut if divergence.step is None else divergence.step
    if divergence.quantity in ("rows", "indices"):
        return _rows(step, cut, expected, observed)
    if divergence.quantity == "tensors received":
        return _tensors(step, expected, observed)
    if divergence.quantity == "learning rate":
        return _rate(step, divergence, expected)
    if divergence.quantity == "loss" and step == cut:
        random = (
            "random numbers are drawn that are not the step's own, such as the first step's dropout mask; or " * draws
        )
        return (
            f"weights, optimizer and rows are right after loading, the loss is not: {random}something is lost that the "
            "checkpoint does not hold, such as a state in the model's attributes"
        )
    if divergence.quantity in ("loss", "parameter") and step >= cut:
        return (
            f"right until the interruption before step {cut}, and the state was restored: an update after it is wrong: "
            "look at the numbers of the parameter groups, and at what the loop itself keeps from step to step"
        )
    if divergence.quantity in ("optimizer steps", "every index once"):
        return "the interrupted epoch was not ended as it began: steps were taken twice, or left out"
    return ""


def _rows_of(trace: Trace, step: int) -> list[int]:
    return [index for process in trace.parts for part in process if part.step == step for index in part.indices]


def _rows(step: int, cut: int, expected: Trace, observed: Trace) -> str:
    """Looks for the step whose rows were read instead."""
    read = _rows_of(observed, step)
    epochs = expected.epochs
    first = min(each for each, epoch in epochs.items() if epoch == epochs[step])
    matching = [each for each in epochs if each != step and _rows_of(expected, each) == read]
    if not read:
        return f"step {step} has no rows: the loader ended, or its prefetched batches were lost with the interruption"
    if step - 1 in matching:
        return f"off by one batch: step {step} reads the rows of step {step - 1} again"
    if step + 1 in matching:
        return f"off by one batch: step {step} reads the rows of step {step + 1}, and its own are left out"
    if first in matching:
        return "the position inside the epoch was lost: the epoch begins again after the interruption"
    if any(epochs[each] < epochs[step] for each in matching) or (epochs[step] and set(matching) & set(range(cut))):
        return "the order of an earlier epoch is replayed: the epoch was not restored (set_epoch)"
    if matching:
        return f"step {step} reads the rows of step {matching[0]}: batches were lost or repeated with the interruption"
    return "other rows after the interruption, or the same in another order: the order's seed or epoch was not restored"


def _tensors(step: int, expected: Trace, observed: Trace) -> str:
    """Looks for the epoch whose augmentation was drawn instead."""
    epoch = expected.epochs[step]
    of_epoch: dict[int, set[tuple[int, str]]] = {}
    for part in (part for process in expected.parts for part in process):
        of_epoch.setdefault(part.epoch, set()).update(zip(part.indices, part.digests))
    read = {
        pair
        for process in observed.parts
        for part in process
        if part.step == step
        for pair in zip(part.indices, part.digests)
    }
    for other, pairs in of_epoch.items():
        if other != epoch and read & pairs:
            return f"the augmentation of epoch {other} is replayed in epoch {epoch}: its key lost the epoch"
    return "the rows are right, their values are not: the augmentation's random numbers were not restored"


def _rate(step: int, divergence: Divergence, expected: Trace) -> str:
    rates = expected.rates[0]
    got = divergence.found if isinstance(divergence.found, list) else [divergence.found]
    if step + 1 < len(rates) and got == rates[step + 1]:
        return "the scheduler is one step ahead: it was counted twice at the interruption"
    if got == rates[0]:
        return "the rate begins anew: the scheduler, or the parameter groups' rates, were not restored"
    if step and got == rates[step - 1]:
        return "the scheduler is one step behind, or its rate was not set after loading"
    return "right until the interruption, wrong after it: the scheduler's state, or what it counts, was not restored"
