"""The remedies that would let a question be judged that could not be: by the id of the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from samestep.message import Message, message
from samestep.records.findings import Finding

REPLAY, LOADER = message("remedy_replay"), message("remedy_loader")
REMEDIES: Mapping[str, Message] = {
    "no_evaluation_seen": message("remedy_record_an_evaluation"),
    "no_training_step": message("remedy_name_the_training"),
    "no_step_to_replay": message("remedy_name_the_training"),
    "inputs_without_rows": LOADER,
    "loader_without_end_or_indices": LOADER,
    "rows_left_out_by_the_sampler": message("remedy_distributed_sampler"),
    "sharding_not_judged": message("remedy_fsdp2"),
    "layers_divided_by_hand": message("remedy_dtensors"),
    "clipped_by_own_code": REPLAY,
    "gradients_changed_alike": REPLAY,
    "gradients_weighed_by_numbers": REPLAY,
    "scaled_by_own_code": REPLAY,
    "several_optimizers_may_sum_losses": REPLAY,
    "losses_have_an_unknown_factor": REPLAY,
    "loss_has_a_written_coefficient": REPLAY,
    "loss_may_be_divided_beforehand": REPLAY,
    "division_of_accumulated_losses_not_seen": REPLAY,
    "optimizer_reduces_gradients_itself": REPLAY,
    "ranks_differ_by_themselves": message("remedy_mend_what_differs"),
    "batches_not_kept": REPLAY,
    "batch_not_saved": message("remedy_plain_batches"),
    "draws_outside_torch": message("remedy_draw_by_torch"),
    "function_reads_ranks": message("remedy_ranks_as_an_argument"),
    "group_of_other_ranks": message("remedy_ranks_from_the_environment"),
    "script_fails_in_one_process": message("remedy_run_in_one_process"),
    "no_collectives_recorded": message("remedy_flight_recorder"),
    "gradient_of_rank_not_finite": message("remedy_finite_gradients"),
}


def with_remedies(findings: Sequence[Finding]) -> list[Finding]:
    """Returns findings; those that are unknown with what it would take to judge them, where that is known."""
    is_replayed = any(finding.question.startswith("replay") for finding in findings)
    return [_with_remedy(finding, is_replayed) for finding in findings]


def _with_remedy(finding: Finding, is_replayed: bool) -> Finding:
    if finding.answer != "unknown" or (finding.remedy and finding.remedy != REPLAY):
        return finding
    said = finding.message
    steps = said.fields.get("steps")
    if said.id == "no_epoch_turned" and steps:
        return replace(finding, remedy=message("remedy_record_steps", steps=steps))
    why = said.fields.get("why")
    reason = why.id if isinstance(why, Message) else said.id
    remedy = REMEDIES.get(reason)
    # It was just tried.
    return replace(finding, remedy=None if is_replayed and remedy == REPLAY else remedy)
