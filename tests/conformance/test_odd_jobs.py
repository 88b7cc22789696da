"""Jobs that are no plain mean over the rows of one tensor: proven where they can be, else refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from inspected_job import inspected_job
from ranks import Ranks, RanksFailed, engine_facts, proof_plan, prove, reference_plan, skip_unless_here
from said import said_by_ranks, says
from samestep.commands.engine_rows import refusal
from samestep.message import message
from samestep.proof.trace import Expectation

ODD = f"{Path(__file__).parent}/jobs_odd.py"

SAME = {
    "time_first": None,
    "side_table": None,
    "reads_indices": None,
    "class_weights": "evaluation_metrics_unsteady",
    "order_matters": "evaluation_metrics_unsteady",
    "autocast": None,
    "large_targets": "rate_of_proof_lowered",
    "random_in_evaluation": "evaluation_metrics_unsteady",
    "buffer_that_is_not_saved": None,
    "buffer_that_moves_between_micro_batches": None,
    "class_weights_that_are_given": None,
    "two_kinds_of_datasets": None,
}


@pytest.mark.parametrize("name", SAME)
def test_same(name: str, ranks: Callable[[int], Ranks], reference_rank: Ranks) -> None:
    verdict = prove(reference_rank, ranks(2), f"{ODD}:{name}", "ddp")
    assert verdict.verdict == "same", verdict
    assert verdict.bitwise
    said = SAME[name]
    assert (said in [note.id for note in verdict.notes]) if said else verdict.notes == ()


def test_what_amplifies_rounding_is_refused(ranks: Callable[[int], Ranks], reference_rank: Ranks) -> None:
    verdict = prove(reference_rank, ranks(2), f"{ODD}:chaos", "ddp")
    assert verdict.verdict == "refused", verdict
    assert verdict.reason and verdict.reason.id.startswith("rounding_moves_")


def test_what_does_not_repeat_itself_is_refused(ranks: Callable[[int], Ranks], reference_rank: Ranks) -> None:
    with pytest.raises(RanksFailed, match="loss_differs_when_computed_again"):
        prove(reference_rank, ranks(2), f"{ODD}:random_numbers_of_python", "ddp")


def test_a_scalar_parameter_is_refused_where_it_cannot_train() -> None:
    job = inspected_job(f"{ODD}:scalar", {}, 2)
    facts = {name: engine_facts(name, 2) for name in ("ddp", "fsdp", "deepspeed", "horovod")}
    facts["model_parallel"] = engine_facts("fabric", 2, {"strategy": "model_parallel"})
    facts["powersgd"] = engine_facts("ddp", 2, {"compress": "powersgd"})
    refused = {name for name, of in facts.items() if of.available and refusal(of, job)}
    able = {name for name, of in facts.items() if of.available}
    assert refused == able - {"ddp", "horovod"}
    why = message("engine_takes_no_scalar_parameter", engine="fsdp", parameters=["logit_scale"])
    assert refusal(facts["fsdp"], job) == why


def test_a_skipped_last_step_does_not_cost_the_epoch_its_rate(
    ranks: Callable[[int], Ranks], reference_rank: Ranks
) -> None:
    facts = engine_facts("amp", 2, {"precision": "fp16"})
    loop = Expectation(reference_rank.work(reference_plan(f"{ODD}:overflows", 2, None, facts)), 0)
    record = ranks(2).work(proof_plan(loop, f"{ODD}:overflows", "amp", 2, None, facts))
    seen = record.training("numerics of sgd")[0]
    assert seen.skipped_steps == 5  # all of the first epoch
    assert seen.rates[0] == pytest.approx([0.9 * loop.facts.sgd_lr])


def test_accelerate_refuses_the_fp16_that_it_would_not_compute(reference_rank: Ranks) -> None:
    skip_unless_here("accelerate")
    with Ranks(2) as own, pytest.raises(RanksFailed) as failed:
        prove(reference_rank, own, f"{ODD}:time_first", "accelerate", None, {"precision": "fp16"})
    says(said_by_ranks(str(failed.value), "Refused"), "accelerate_computes_in_float32_on_cpu")
