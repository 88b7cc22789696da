"""Names the cause of a difference by faults that have been tried: the reference replays the training with each.

Pure functions: what the reference must replay for a difference, and which of its trials explain it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from samestep.message import Message, message
from samestep.proof.compare import Comparison
from samestep.proof.trace import Expectation, of_engine
from samestep.records.files import read
from samestep.records.plan import ProveTask, ReferencePlan, Suspect
from samestep.records.record import Record
from samestep.records.results import Divergence, Verdict
from samestep.records.trial import Trial

# The differences that another step of the reference can explain. The others are facts: rows, weights, names.
REPLAYED = {"loss", "first gradient", "parameter", "buffer", "learning rate", "optimizer steps"}
STEPPED = ("gradient", "sgd", "user", "late")  # the trainings whose every step is recorded
LOST = "what_forward_writes_is_lost"  # the fault of that id
AS_WELL = 10  # times the rest that the best fault leaves: faults with a rest up to this explain the difference, too


def replay_plan(divergence: Divergence, expectation: Expectation, record: Record, out: str) -> ReferencePlan | None:
    """Returns what the reference replays to explain a difference; None where facts alone explain it.

    expectation, record: between which it is. out: the folder for the record of the trials.
    """
    if divergence.quantity not in REPLAYED or divergence.training not in STEPPED or not divergence.name:
        return None
    training, name, processes = divergence.training, divergence.name, len(record.ranks)
    observed = of_engine(record, name)
    expected = expectation.trace(training, 0, processes, observed.mesh)
    variants = range(1, len(expectation.facts.trainings[training]))
    comparison = Comparison(expectation, record, name.replace(training, "{}"))
    losses = [[[part.loss_sum for part in process] for process in trace.of_replicas] for trace in (expected, observed)]
    numbers = [value for process in losses[1] for value in process]
    if not all(map(math.isfinite, numbers)) or list(map(len, losses[0])) != list(map(len, losses[1])):
        return None
    after_last = divergence.step is None or divergence.quantity in ("parameter", "buffer")
    rank, folder = divergence.rank or 0, record.folder_of(name)
    task = next(task for task in Record(folder).plan().trainings if task.name == name)
    assert isinstance(task, ProveTask)
    played = read(ReferencePlan, expectation.record.folder / "plan.json")
    suspect = Suspect(
        training=replace(task, interrupted=None, engine_settings={}),
        quantity=divergence.quantity,
        step=expected.last_step + 1 if after_last or divergence.step is None else divergence.step,
        steps_of=[[part.step for part in process] for process in expected.of_replicas],
        found=losses[1],
        expected=losses[0],
        bounds=comparison.loss_bounds(
            expected, [expectation.trace(training, n, processes, observed.mesh) for n in variants]
        ),
        rates=observed.rates[rank],
        expected_rates=expected.rates[rank],
        tensors=((str(folder), name), (str(expectation.record.folder), f"{expectation.facts.files}.{training}")),
        tensor_bounds=comparison.tensor_bounds(training, expected.state, buffers=divergence.quantity == "buffer"),
    )
    return replace(played, out=out, layouts=(played.layouts[expectation.number],), suspect=suspect)


def explained(divergence: Divergence, trials: Sequence[Trial]) -> Divergence:
    """Returns a difference with the cause that trials of the reference give it, and these trials."""
    return replace(divergence, cause=_with_inner(divergence.cause, _cause(divergence, trials)), tried=tuple(trials))


def _cause(divergence: Divergence, trials: Sequence[Trial]) -> Message:
    explaining = sorted((trial for trial in trials if trial.explains), key=lambda trial: trial.unexplained or 0.0)
    explaining = [trial for trial in explaining if not trial.general] or explaining
    if not explaining:
        left = sum(trial.unexplained is None for trial in trials)
        facts = _inner(divergence.cause)
        if fitting := [trial for trial in trials if trial.fits]:
            share = min(trial.rounding for trial in fitting)
            return message("cause_hidden_by_rounding", facts=facts, fitting=len(fitting), share=share)
        return message("cause_unknown", facts=facts, tried=len(trials) - left, left=left or None)
    least = explaining[0].unexplained or 0.0
    close = [
        trial for trial in explaining if (trial.unexplained or 0.0) <= max(AS_WELL * least, AS_WELL * trial.rounding)
    ]
    causes = [message("fault_and_its_steps", fault=trial.cause, where=trial.where) for trial in close]
    if len(causes) == 1:
        return message("fault_gives_what_was_found", cause=causes[0])
    return message("several_faults_give_what_was_found", causes=causes)


def _inner(cause: Message | None) -> Message | None:
    """Returns the inner cause of a message about a later epoch or about the job's own dtype alone; another cause as it
    is."""
    inner = cause.fields.get("cause") if cause else None
    return inner if isinstance(inner, Message) else cause


def _with_inner(cause: Message | None, inner: Message) -> Message:
    if cause is None or not isinstance(cause.fields.get("cause"), Message):
        return inner
    return Message(cause.id, {**cause.fields, "cause": inner})


def with_tried_cause(
    verdict: Verdict,
    expectations: Mapping[str, Expectation | None],
    record: Record,
    out: str,
    play: Callable[[ReferencePlan], Record],
) -> Verdict:
    """Returns a verdict whose first difference has a cause that has been tried, where the reference can try it.

    expectations: 'sgd' as the record names it, with '{}' for the training -> what it is compared with. out: as of
    replay_plan. play: has the reference do what a plan says.
    """
    divergence = verdict.first_divergence
    expectation = divergence and expectations.get(divergence.name.replace(divergence.training, "{}"))
    plan = replay_plan(divergence, expectation, record, out) if divergence and expectation else None
    if divergence is None or plan is None:
        return verdict
    trials = play(plan).ranks[0].trials
    if lost := _lost_writes(trials, record, divergence.name):
        # No engine whose ranks hold parts of the parameters can do what the job asks for: this engine is not to blame.
        reason = message("parts_lose_what_forward_writes", names=lost)
        return replace(verdict, verdict="refused", first_divergence=None, reason=reason)
    return replace(verdict, first_divergence=explained(divergence, trials))


def _lost_writes(trials: Sequence[Trial], record: Record, training: str) -> list[str]:
    """Returns the parameters whose changes by the forward pass the ranks lose, because each holds a part of them alone;
    empty where this was not tried, or does not give what was found."""
    names = [name for t in trials if t.cause.id == LOST and t.explains for name in t.cause.fields["names"]]
    # The parameters that several ranks have copies of.
    copied = {name for rank in record.training(training) for name in rank.end_digests}
    return [] if copied.intersection(names) else names
