"""Names the axes of a mesh along which a training is wrong: it is proven again on parts of the mesh.

Pure functions but for `tried_axes`, whose caller starts the ranks. On a part some axes have their ranks, and each other
axis has one rank: a difference that vanishes without an axis, and shows with this axis alone, is along this axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from samestep.bounds import STANDS_STILL
from samestep.message import Message, message
from samestep.proof.compare import Comparison
from samestep.proof.modules import module_of
from samestep.proof.plan import AS_OWN, QUICK, loop_layout, own_dtype_layout
from samestep.proof.trace import Expectation, of_engine
from samestep.records.inspection import EngineFacts
from samestep.records.origin import AxisTrial, Origin
from samestep.records.plan import OUTPUTS, LayoutPlan, ProveTask, Subset, Task
from samestep.records.record import Record
from samestep.records.results import Verdict

if TYPE_CHECKING:
    from samestep.world.mesh import Mesh

DEADLINE = "launch_reached_its_deadline"


def tried_axes(mesh: Mesh, try_part: Callable[[Mesh], AxisTrial]) -> tuple[AxisTrial, ...]:
    """Tries a mesh once more, then its parts, the smallest first: one rank, each axis alone, several axes. No part is
    tried that contains one which is wrong already."""
    trials = [try_part(mesh)]
    if trials[0].differs:
        for part in mesh.parts[:-1]:
            if not any(trial.differs and {*trial.axes} <= {*part.sizes} for trial in trials):
                trials.append(try_part(part))
    return tuple(trials)


def origin_of(trials: Sequence[AxisTrial], *, is_failure: bool = False) -> Origin:
    """Returns along which axes a training is wrong. trials: as tried_axes() returns them. is_failure: it failed,
    perhaps in another training than those that were tried."""
    full_trial, *parts = trials
    wrong = [trial for trial in parts if trial.differs]
    fields = {
        "gone": [_part(trial) for trial in parts if trial.differs is False] or None,
        "untried": [_part(trial) for trial in parts if trial.differs is None] or None,
        "why": next((trial.why for trial in parts if trial.why), None),
    }
    axes = {axis for trial in wrong for axis in trial.axes}
    if full_trial.differs is None:
        said = message("axes_not_tried", why=full_trial.why)
    elif not full_trial.differs:
        said = message("not_wrong_when_tried_again", mesh=full_trial.mesh)
        if is_failure:
            said = message("axes_not_tried", why=message("failure_is_not_of_first_trainings"))
    elif any(not trial.axes for trial in wrong):
        said = message("wrong_on_one_rank")
    elif wrong:
        said = message("wrong_along_axes", axes=sorted(axes), parts=[_part(trial) for trial in wrong], **fields)
    elif fields["untried"]:
        said = message("axes_not_known", **fields)
    else:
        axes = {*full_trial.axes}
        place = {"axes": [*full_trial.axes], "mesh": _part(full_trial), "gone": fields["gone"]}
        said = message("wrong_along_axis", **place) if len(axes) == 1 else message("wrong_along_axes_together", **place)
    return Origin(tuple(axis for axis in full_trial.axes if axis in axes), said=(said,), trials=tuple(trials))


def _part(trial: AxisTrial) -> str | Message:
    return trial.mesh.replace(",", " x ") if trial.axes else message("one_rank")


def why_not_by_axes(verdict: Verdict) -> Message | None:
    """Returns why a wrong training is not proven on parts of its mesh; None where it is."""
    divergence = verdict.first_divergence
    if divergence and (divergence.training == "life" or not _names(verdict)):
        return message("training_is_not_tried_by_axes", training=divergence.name or divergence.training)
    return None


def _names(verdict: Verdict) -> str:
    """Returns the record's name for the trainings of which one differs, '{}' for the proof's; '' for trainings that
    were not tried."""
    divergence = verdict.first_divergence
    if divergence is None:
        return "{}"
    names = divergence.name.replace(divergence.training, "{}")
    return names if names in ("{}", AS_OWN) else ""


def part_trainings(verdict: Verdict, planned: Sequence[Task]) -> tuple[ProveTask, ...]:
    """Returns the trainings that show what is wrong: the one that differs or, after a failure, the first ones."""
    divergence = verdict.first_divergence
    names = (divergence.name,) if divergence else QUICK
    return tuple(task for task in planned if isinstance(task, ProveTask) and task.name in names)


def part_layout(facts: EngineFacts, verdict: Verdict, subset: Subset) -> LayoutPlan:
    """Returns the layout of an engine on a part of a mesh, which the reference plays. subset: the rows that the
    training takes, the same on all parts."""
    divergence = verdict.first_divergence
    layout = own_dtype_layout(facts) if _names(verdict) == AS_OWN else loop_layout(facts)
    assert layout
    return replace(layout, trainings=(divergence.training,) if divergence else QUICK, subset=subset)


def planned_on_part(trainings: Sequence[ProveTask], played: Expectation, *, is_whole: bool) -> tuple[ProveTask, ...]:
    """Returns the trainings at the rate that the reference took on a part. is_whole: whether this is the whole mesh, on
    which the outputs of modules are compared."""
    return tuple(
        replace(
            task,
            sgd_lr=played.facts.sgd_lr,
            interrupted=None,
            notes_outputs=is_whole and notes_outputs((task,)),
        )
        for task in trainings
    )


def notes_outputs(trainings: Sequence[ProveTask]) -> bool:
    """Returns whether what modules return is compared in one of these trainings: in the exact first gradient."""
    return any(task.name == "gradient" for task in trainings)


def with_module(origin: Origin, verdict: Verdict, played: Expectation, record: Record | None) -> Origin:
    """Returns an origin with the module with which the difference begins.

    played, record: of the trial on the whole mesh; None: there is no record of it.
    """
    divergence = verdict.first_divergence
    if not origin.trials[0].differs or record is None or divergence is None:
        return origin
    training, ranks = divergence.training, range(len(record.ranks))
    expected: Mapping[str, Any] = {}
    found: list[Mapping[str, Any]] = []
    if divergence.name == "gradient":
        expected = played.record.arrays(OUTPUTS.format(f"{played.facts.files}.gradient"))
        found = [record.arrays(OUTPUTS.format("gradient"), rank) for rank in ranks]
    differences = [*Comparison(played, record, _names(verdict)).divergences(training)]
    tied = _tied(played.arrays(training), record.arrays(divergence.name))
    differences = [difference for difference in differences if difference.tensor not in tied]
    observed = of_engine(record, divergence.name)
    trained = [name for name in _trained(played, training) if name not in tied]
    module, said = module_of(differences, observed, trained, expected, found)
    return replace(origin, module=module, said=(*origin.said, *([said] if said else [])))


def _trained(played: Expectation, training: str) -> list[str]:
    """Returns the names of the parameters that a training moves, in the order of the model."""
    moved = {name: played.of(training).moved[name].distance for name in played.of(training).parameters}
    return [name for name, distance in moved.items() if distance > STANDS_STILL * max(moved.values())]


def _tied(*states: Mapping[str, Any]) -> set[str]:
    """Returns the names of tensors that an earlier name stands for already: both names have the same values in all
    states."""
    first, tied = dict[tuple[bytes, ...], str](), set[str]()
    for name in states[0]:
        values = tuple(state[name].tobytes() for state in states if name in state)
        if first.setdefault(values, name) != name:
            tied.add(name)
    return tied


def trial_of(
    mesh: Mesh, facts: EngineFacts, verdict: Verdict, played: Expectation, train: Callable[[], Record | Message]
) -> AxisTrial:
    """Returns what the proof on a part of a mesh shows of a wrong training.

    facts: of the engine there. verdict: on the whole mesh. played: what the reference played of it. train: trains on
    the part, and returns the record, or why it failed.
    """
    axes, name = (*mesh.sizes,), str(mesh)
    if why := next(iter(played.facts.not_played.values()), None):
        return AxisTrial(axes, name, None, message("reference_not_played", why=why))
    found = train()
    if isinstance(found, Message):
        # A part that fails in another way tells nothing, as each of its ranks holds more of the model. Nor does a
        # deadline.
        same = verdict.reason is not None and verdict.reason.id == found.id != DEADLINE
        return AxisTrial(axes, name, True) if same else AxisTrial(axes, name, None, found)
    assert facts.numerics
    comparison = Comparison(played, found, _names(verdict), inexact=facts.numerics.lossy)
    differs = any(True for training in played.facts.trainings for _ in comparison.divergences(training))
    return AxisTrial(axes, name, differs)
