"""Published bugs that `samestep check` names by their own cause, and their right versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from lane_marks import in_turn
from recorder.plant import checked

MUSEUM = Path(__file__).parents[2] / "museum"
CAUSES = {
    "tensor_norm_counts_copies": "clipped_by_norm_of_copies",
    "vocabulary_parallel_smoothing": "replica_losses_apart",
    "loss_parallel_log_softmax": "log_softmax_alone_in_loss_parallel",
    "vocabulary_parallel_padding": "elements_without_gradient",
    "expert_balance_of_all_tokens": "loss_of_same_outputs_apart",
    "sequence_labels_shifted_by_part": "targets_of_ranks_apart",
    "sequence_positions_of_each_part": "module_is_given_otherwise",
    "vocabulary_parallel_gathered_logits": "loss_of_whole_outputs_apart",
    "expert_router_gathered": "gather_cuts_gradient",
    "fsdp_ignored_parameters": "parameters_left_out_of_reduction",
    "fsdp2_adapters_added_later": "ranks_never_reduce_gradients",
}


@pytest.mark.parametrize(
    ("name", "cause"), [pytest.param(*case, marks=in_turn(2, n)) for n, case in enumerate(CAUSES.items())]
)
def test_the_cause_is_named_and_the_right_version_is_right(name: str, cause: str, tmp_path: Path) -> None:
    answers = {}
    for version in ("right", "wrong"):
        (tmp_path / version).mkdir()
        answers[version] = checked((MUSEUM / name / f"{version}.py").read_text(), tmp_path / version, nproc=2)
    assert answers["right"].answer == "right", answers["right"].findings
    assert cause in {finding.message.id for finding in answers["wrong"].findings}, answers["wrong"].findings
    assert answers["wrong"].answer == "differs"
