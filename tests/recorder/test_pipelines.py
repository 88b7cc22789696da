"""`samestep check` of the stages of a pipeline: the healthy twins, and some of their faults."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lane_marks import in_turn
from planting import Edit, with_patches
from recorder.plant import checked

sys.path.insert(0, str(Path(__file__).parents[1] / "twins"))

from corpus.faults.pipelines import CALLS, FAULTS, LOSS, MADE, TRACED
from corpus.healthy import ranks_of
from corpus.twin import SCRIPTS, Fault, Healthy, file_of, text_of

HEALTHY = [
    Healthy("pipeline", "--schedule ZBVZeroBubble --tied --clip 0.3"),
    Healthy("pipeline", "--schedule InterleavedZeroBubble --dropout 0.1"),
    Healthy("pipeline_replicas", "--ddp"),
    Healthy(TRACED, "--tied"),
    Healthy(TRACED, "--skip"),
    Healthy(TRACED, "--dropout 0.1 --micro 2"),
    Healthy(TRACED, "--schedule Interleaved1F1B"),
]
NAMED = ["tied_copies_not_summed", "clipped_by_stage_norms", "micro_batches_left_out", "gradients_added_over_stages"]
NAMED += [
    "earlier_calls_divided_again",
    "stages_of_other_models",
    "stages_read_other_rows",
    "stage_not_reduced_over_replicas",
]
PLANTED = [next(fault for fault in FAULTS if fault.kind == kind and fault.script != TRACED) for kind in NAMED]
PLANTED += [fault for fault in FAULTS if fault.script == TRACED]
LINEAR = "self.layers = nn.ModuleList("


@pytest.mark.parametrize(
    "twin",
    [pytest.param(twin, id=twin.name, marks=in_turn(3, n) if n else ()) for n, twin in enumerate(HEALTHY)],
)
def test_a_healthy_pipeline_is_right(twin: Healthy, tmp_path: Path) -> None:
    ranks = ranks_of(twin)
    results = checked(text_of(twin), tmp_path, script_arguments=twin.arguments.split(), nproc=ranks)
    assert results.answer == "right", results.findings
    assert all(finding.answer != "warning" for finding in results.findings)
    assert any(finding.question == "replayed gradient" for finding in results.findings)
    assert any(note.id == "pipeline_of_ranks" for note in results.notes)


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, id=fault.name, marks=in_turn(4, n)) for n, fault in enumerate(PLANTED)]
)
def test_a_fault_of_a_pipeline_is_named(fault: Fault, tmp_path: Path) -> None:
    ranks = ranks_of(fault)
    results = checked(text_of(fault), tmp_path, script_arguments=fault.arguments.split(), nproc=ranks)
    assert fault.kind in {finding.message.id for finding in results.findings}, results.findings
    assert results.answer == "differs"


@pytest.mark.check
def test_calls_of_a_schedule_that_accumulate_are_right(tmp_path: Path) -> None:
    text = (SCRIPTS / file_of("pipeline")).read_text()
    edits = {
        "schedule.step(*given, **wanted)": CALLS,
        MADE: MADE.replace("loss_fn=loss_fn", "loss_fn=loss_fn, scale_grads=False"),
        LOSS: f"{LOSS} / 8",
    }
    results = checked(with_patches(text, *(Edit(*edit) for edit in edits.items())), tmp_path, nproc=2)
    assert results.answer == "right", results.findings
    assert all(finding.answer != "warning" for finding in results.findings)


@pytest.mark.check
def test_stages_that_are_not_the_whole_model_are_unknown(tmp_path: Path) -> None:
    text = (SCRIPTS / file_of("pipeline")).read_text()
    forward = "    def forward(self, x):\n        if self.embed is not None:"
    # What a stage computes depends on how often it was called: played again, it is another.
    calls = "    calls = 0\n\n    def forward(self, x):\n        self.calls += 1\n        if self.head is not None:\n"
    calls += "            x = x * (1 + 0.01 * self.calls)\n        if self.embed is not None:"
    results = checked(with_patches(text, Edit(forward, calls)), tmp_path, nproc=2)
    assert results.answer == "unknown", results.findings
    said = next(finding for finding in results.findings if finding.question == "replay")
    assert said.message.fields["why"].id == "chain_has_another_loss"


@pytest.mark.check
def test_clipping_that_never_took_effect_is_unknown(tmp_path: Path) -> None:
    """Each stage by its own norm, which no recorded step shows where the limit is not reached."""
    fault = next(fault for fault in FAULTS if fault.kind == "clipped_by_stage_norms" and "clip_grad_norm_" in fault.new)
    arguments = fault.arguments.split()
    arguments[arguments.index("--clip") + 1] = "1000"
    results = checked(text_of(fault), tmp_path, script_arguments=arguments, nproc=2)
    clipping = next(finding for finding in results.findings if finding.question == "clipping")
    assert (clipping.answer, clipping.message.id) == ("unknown", "no_step_reached_the_limit")
