"""`samestep check` of scripts that divide a model or its rows by hand: the healthy twins, and some of their faults."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lane_marks import in_turn
from planting import Edit, with_patches
from recorder.plant import checked

sys.path.insert(0, str(Path(__file__).parents[1] / "twins"))

from corpus.faults.by_hand import EXPERTS, FAULTS, GROUPS, LAYERS, SEQUENCE, STAGES
from corpus.healthy import ranks_of
from corpus.twin import Fault, Healthy, text_of

HEALTHY = [Healthy(LAYERS, ""), Healthy(EXPERTS, "--local"), Healthy(SEQUENCE, "--how ulysses --clip 0.3")]
HEALTHY += [Healthy(STAGES, "--clip 0.1"), Healthy(GROUPS, ""), Healthy(GROUPS, "--clip 0.3")]
NAMED = [
    (LAYERS, "gradient_incomplete_along_axis"),
    (LAYERS, "module_computes_otherwise"),
    (LAYERS, "pieces_begin_alike"),
    (EXPERTS, "gradient_scaled_along_axis"),
    (EXPERTS, "exchange_is_cut_off"),
    (SEQUENCE, "gradient_scaled_along_axis"),
    (SEQUENCE, "module_computes_otherwise"),
    (STAGES, "clipped_by_stage_norms"),
]
PLANTED = [next(fault for fault in FAULTS if (fault.script, fault.kind) == named) for named in NAMED]
PLANTED += [fault for fault in FAULTS if fault.script == GROUPS]
BY_ARGUMENTS = ("gradients_summed_over_ranks", "gradients_divided_by_ranks_again", "replica_begins_apart")


@pytest.mark.parametrize(
    "twin", [pytest.param(twin, id=twin.name, marks=in_turn(2, n)) for n, twin in enumerate(HEALTHY)]
)
def test_a_script_that_divides_by_hand_is_right(twin: Healthy, tmp_path: Path) -> None:
    ranks = ranks_of(twin)
    results = checked(text_of(twin), tmp_path, script_arguments=twin.arguments.split(), nproc=ranks)
    assert results.answer == "right", results.findings
    assert all(finding.answer != "warning" for finding in results.findings)


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, id=fault.name, marks=in_turn(4, n)) for n, fault in enumerate(PLANTED)]
)
def test_a_fault_of_what_is_divided_by_hand_is_named(fault: Fault, tmp_path: Path) -> None:
    ranks = ranks_of(fault)
    results = checked(text_of(fault), tmp_path, script_arguments=fault.arguments.split(), nproc=ranks)
    assert fault.kind in {finding.message.id for finding in results.findings}, results.findings
    assert results.answer == "differs"


@pytest.mark.check
@pytest.mark.parametrize(
    ("twin", "layer"),
    [
        (Healthy(LAYERS, ""), "self.weight, self.bias = piece(whole.weight, 1)"),
        (Healthy(EXPERTS, "--local"), "self.up, self.down = "),
    ],
    ids=["pieces", "experts"],
)
def test_a_layer_that_begins_as_zeros_is_right(twin: Healthy, layer: str, tmp_path: Path) -> None:
    """Its pieces are the same on each rank, and what lies before it has no gradient in the first step."""
    text = text_of(twin)
    (line,) = [line for line in text.splitlines(keepends=True) if layer in line]
    indent = line[: len(line) - len(line.lstrip())]
    zeros = "nn.init.zeros_(whole.weight)\n" if "whole" in line else "nn.init.zeros_(self.down.weight)\n"
    text = text.replace(line, f"{indent}{zeros}{line}" if "whole" in line else f"{line}{indent}{zeros}")
    results = checked(text, tmp_path, script_arguments=twin.arguments.split(), nproc=ranks_of(twin))
    assert results.answer == "right", results.findings


@pytest.mark.check
def test_pieces_by_an_argument_are_judged_along_data(tmp_path: Path) -> None:
    """One process makes pieces, too: what the ranks of a replica compute together is unknown."""
    results = checked(text_of(Healthy(GROUPS)), tmp_path, script_arguments=["--by-arguments"], nproc=4)
    answers = {finding.question: finding.answer for finding in results.findings}
    assert (results.answer, results.missing) == ("unknown", ["replayed gradient"]), results.findings
    assert {answers[of] for of in ("initial weights", "rows", "gradient", "loss weight", "weights")} == {"right"}
    assert "differs" not in answers.values() and "warning" not in answers.values()


@pytest.mark.check
def test_what_replicas_tell_each_other_is_not_replayed(tmp_path: Path) -> None:
    """One process has the rows of all replicas, and no replica's own."""
    text, line = text_of(Healthy(GROUPS)), "            logits = model(batch[:, :-1])\n"
    gather = "            others = [torch.empty_like(logits) for _ in range(args.dp)]\n"
    gather += "            dist.all_gather(others, logits.detach(), group=groups.data)\n"
    results = checked(with_patches(text, Edit(line, line + gather)), tmp_path, nproc=4)
    said = next(finding for finding in results.findings if finding.question == "replay")
    assert (results.answer, said.message.fields["why"].id) == ("unknown", "replicas_exchange"), results.findings


@pytest.mark.check
@pytest.mark.parametrize("kind", BY_ARGUMENTS)
def test_a_fault_along_data_is_named_where_pieces_are_by_an_argument(kind: str, tmp_path: Path) -> None:
    fault = next(fault for fault in FAULTS if (fault.script, fault.kind) == (GROUPS, kind))
    results = checked(text_of(fault), tmp_path, script_arguments=["--by-arguments"], nproc=4)
    assert results.first_divergence and results.first_divergence.quantity.endswith("along data")
    assert kind in {finding.message.id for finding in results.findings}, results.findings
    assert not any(finding.patch and "broadcast" in finding.patch for finding in results.findings)
