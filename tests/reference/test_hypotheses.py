"""Each candidate fault explains a training that has it; without one the replay is the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lane_marks import CHECK
from mutations import jobs
from samestep.engine import Layout
from samestep.job import Job
from samestep.message import message
from samestep.proof.hypotheses import explained
from samestep.records.plan import LayoutPlan, ProveTask, Suspect
from samestep.records.results import Divergence
from samestep.records.tensor_files import write_state
from samestep.records.trial import Trial
from samestep.reference import per_epoch, play
from samestep.reference.faulty_training import HEALTHY, FaultyTraining, Hypothesis, Moment
from samestep.reference.hypotheses import Found, hypotheses, steps_to_act_at
from samestep.report.verdicts import was_tried
from samestep.tasks import try_hypotheses
from samestep.tasks.proof_job import proof_job, steps_of
from samestep.tasks.try_hypotheses import Replay
from samestep.world import World

LAYOUT = Layout(2, "even", "rank0")
ROUNDING = 1e-12


def task(training: str) -> ProveTask:
    return ProveTask(training, 8, "float64", 2, 0.05, name=training)


def trained(
    job: Job, training: str, hypothesis: Hypothesis, acts: Callable[[Moment], bool]
) -> tuple[FaultyTraining, dict[str, torch.Tensor]]:
    small = proof_job(job, task(training))
    faulty = FaultyTraining(small, LAYOUT, "cpu", hypothesis, acts)
    for step, schedule_step in enumerate(steps_of(task(training), small, per_epoch(small))):
        faulty.step(step, schedule_step)
    return faulty, {name: tensor.clone() for name, tensor in faulty.final_state().items()}


def losses(training: FaultyTraining) -> list[list[float]]:
    return [[(m.loss or 0.0) * m.weight for m in training.micro_batches[r]] for r in range(LAYOUT.replicas)]


def trials_of(
    folder: Path, job: Job, training: str, hypothesis: Hypothesis, acts: Callable[[Moment], bool]
) -> list[Trial]:
    """The trials of a training that has a fault; none where its losses and weights do not show it."""
    (right, expected), (wrong, found) = trained(job, training, HEALTHY, acts), trained(job, training, hypothesis, acts)
    pairs = [pair for process in zip(losses(wrong), losses(right)) for pair in zip(*process)]
    numbers = [micro_batch.step for replica in range(2) for micro_batch in right.micro_batches[replica]]
    differing = [step for step, (got, want) in zip(numbers, pairs) if abs(got - want) > ROUNDING]
    rates = [step for step, (got, want) in enumerate(zip(wrong.rates, right.rates)) if got != want]
    if not differing and not rates and all(torch.allclose(found[n], expected[n], 1e-12, 0) for n in found):
        return []
    step = min([*differing, *rates], default=max(numbers) + 1)
    files = ("found", "expected")
    for name, state in zip(files, (found, expected)):
        write_state(folder, 0, name, {n: t for n, t in state.items() if t.is_floating_point()})
    suspect = Suspect(
        training=task(training),
        quantity="learning rate" if rates and step == rates[0] else "loss",
        step=step,
        steps_of=[[m.step for m in right.micro_batches[replica]] for replica in range(2)],
        found=losses(wrong),
        expected=losses(right),
        bounds=[ROUNDING] * 8,
        rates=wrong.rates,
        expected_rates=right.rates,
        tensors=((str(folder), "found"), (str(folder), "expected")),
        tensor_bounds=dict.fromkeys((n for n, t in found.items() if t.is_floating_point()), ROUNDING),
    )
    return list(Replay(job, suspect, LayoutPlan(2), World()).trials())


def cause(trials: list[Trial]) -> list[tuple[str, str]]:
    """(fault, steps) of those that the cause names."""
    found = explained(Divergence("sgd", 1, "loss", None, None, 0.0, 1.0, message("first_loss_differs")), trials).cause
    assert found
    if found.id == "cause_unknown":
        return []
    named = found.fields.get("causes") or [found.fields["cause"]]
    return [(one.fields["fault"].id, one.fields["where"].id) for one in named]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("conv", marks=CHECK),
        pytest.param("tied", marks=CHECK),
        pytest.param("transformer", marks=CHECK),
        "warming",
        "closure",
        "phases",
    ],
)
def test_without_a_fault_the_replay_is_the_reference(name: str) -> None:
    job = getattr(jobs, name)()
    for training in ("gradient", "user", "late"):
        small = proof_job(job, task(training))
        right = play(small, LAYOUT, steps_of(task(training), small, per_epoch(small)), evaluated=False)
        replayed, state = trained(job, training, HEALTHY, lambda moment: True)
        for replica in range(2):
            for want, got in zip(right.micro_batches[replica], replayed.micro_batches[replica]):
                assert got.loss == pytest.approx(want.loss, rel=1e-11)
        assert replayed.rates == right.rates
        for tensor, want in right.state.items():
            torch.testing.assert_close(state[tensor], want, rtol=1e-10, atol=1e-12)


@CHECK
@pytest.mark.parametrize(
    ("name", "training"), [pytest.param("warming", "user", marks=pytest.mark.full), ("tied", "sgd")]
)
def test_each_fault_is_named_by_its_replay(name: str, training: str, tmp_path: Path) -> None:
    job = getattr(jobs, name)()
    small = proof_job(job, task(training))
    explained_by = {}
    for hypothesis in list(hypotheses(small, LAYOUT, training, "loss", Found())):
        if hypothesis.id.startswith(("autocast", "buffers", "random")) or "rounded" in hypothesis.id:
            continue  # of other jobs, or other dtypes
        trials = trials_of(tmp_path, job, training, hypothesis, lambda moment: True)
        if trials:
            explained_by[hypothesis.id] = cause(trials)
    assert len(explained_by) > 10
    assert {fault: named for fault, named in explained_by.items() if fault not in dict(named)} == {}
    assert [fault for fault, named in explained_by.items() if len(named) > 2] == []


@pytest.mark.parametrize(
    ("fault", "steps"),
    [
        ("gradients_never_reduced", "at_last_steps_of_epochs"),
        pytest.param("gradients_not_cleared", "at_one_step", marks=CHECK),
        ("state_of_optimizer_forgotten", "at_first_steps_of_epochs"),
        pytest.param("gradients_summed_instead_of_averaged", "from_epoch_on", marks=CHECK),
    ],
)
def test_the_steps_at_which_a_fault_acts_are_named(fault: str, steps: str, tmp_path: Path) -> None:
    job = jobs.warming()
    small = proof_job(job, task("sgd"))
    (hypothesis,) = (h for h in hypotheses(small, LAYOUT, "sgd", "loss", Found()) if h.id == fault)
    length = per_epoch(small)
    moments = [Moment(s, s, s // length, s > 0 and s % length == 0, (s + 1) % length == 0) for s in range(8)]
    at = {"at_one_step": 2, "at_last_steps_of_epochs": length - 1}.get(steps, length)
    possible = steps_to_act_at(hypothesis, moments, at + hypothesis.delay, closure=False)
    acts = next(candidate for candidate in possible if candidate.id == steps)
    assert (fault, steps) in cause(trials_of(tmp_path, job, "sgd", hypothesis, acts.includes))


def test_how_many_faults_are_tried_is_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the clock has no part in it: what is left out is counted."""
    monkeypatch.setattr(try_hypotheses, "MOST_FLOP", 4 * try_hypotheses.OF_STEP)
    job = jobs.warming()
    small = proof_job(job, task("sgd"))
    hypothesis = next(h for h in hypotheses(small, LAYOUT, "sgd", "loss", Found()) if h.id == "gradients_not_cleared")
    acts = [trials_of(tmp_path, job, "sgd", hypothesis, lambda moment: moment.step in (3, 5)) for _ in range(2)]
    tried = [[trial.unexplained is not None for trial in trials] for trials in acts]
    assert tried[0] == tried[1]
    assert any(tried[0]) and not all(tried[0])


def test_a_fault_that_nothing_explains_is_said_to_be_unknown() -> None:
    trials = [Trial(message("gradients_rounded", dtype="bfloat16"), message("at_every_step"), 0.4)] * 3
    divergence = Divergence("sgd", 1, "loss", None, None, 0.0, 1.0, message("first_loss_differs"))
    found = explained(divergence, [*trials, replace(trials[0], unexplained=None)])
    assert found.cause == message("cause_unknown", facts=message("first_loss_differs"), tried=3, left=1)


def test_a_fault_without_a_free_number_is_preferred() -> None:
    where = message("at_every_step")
    fitted = Trial(message("loss_scaled_by_another_factor", factor=2.0), where, 0.0, general=True)
    summed = Trial(message("gradients_summed_instead_of_averaged", ranks=2), where, 0.0)
    assert cause([fitted, summed]) == [("gradients_summed_instead_of_averaged", "at_every_step")]
    assert cause([fitted]) == [("loss_scaled_by_another_factor", "at_every_step")]


def test_a_difference_of_the_size_of_rounding_has_no_cause() -> None:
    """Three faults that come within its bounds are not three causes; of a clear difference they are a choice."""

    def named(rounding: float) -> Divergence:
        faults = ("clipping_left_out", "gradients_not_cleared", "optimizer_step_left_out")
        trials = [Trial(message(fault), message("at_every_step"), 0.0, rounding) for fault in faults]
        return explained(Divergence("sgd", 1, "loss", None, None, 0.0, 1.0, message("first_loss_differs")), trials)

    vague, clear = named(0.5).cause, named(1e-6).cause
    assert vague and (vague.id, vague.fields["fitting"]) == ("cause_hidden_by_rounding", 3)
    assert clear and clear.id == "several_faults_give_what_was_found"
    assert was_tried(clear) and not was_tried(vague)
