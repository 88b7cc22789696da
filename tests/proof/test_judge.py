"""The judge itself: it reads every quantity that it claims to, and each verdict means what it says."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command import DRAWN
from mutations.faults import DDP, Fault
from mutations.plant import patched
from ranks import Ranks, engine_facts, proof_plan, prove, reference_plan
from samestep.proof.judge import judge
from samestep.proof.trace import Expectation
from samestep.records.record import Record


class Tampered(Record):
    """A healthy record whose content a test may change."""

    def __init__(self, record: Record) -> None:
        super().__init__(record.folder)
        object.__setattr__(self, "changed_ranks", copy.deepcopy(record.ranks))
        object.__setattr__(self, "changed", {})

    @property
    def ranks(self) -> list[dict[str, Any]]:
        return self.changed_ranks  # type: ignore[attr-defined, no-any-return]

    def arrays(self, name: str, rank: int = 0) -> dict[str, Any]:
        return super().arrays(name, rank) | self.changed.get(name, {})  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def healthy(ranks: Callable[[int], Ranks], judge_rank: Ranks) -> tuple[Expectation, Record]:
    reference = judge_rank.work(reference_plan("jobs:conv", 2))
    expectation = Expectation(reference, 0)
    return expectation, ranks(2).work(proof_plan(expectation, "jobs:conv", "ddp", 2))


def _sgd(record: Tampered, rank: int = 1) -> dict[str, Any]:
    return record.ranks[rank]["trainings"]["sgd"]  # type: ignore[no-any-return]


def _weight(name: str, change: Callable[[Any], Any], training: str = "sgd") -> Callable[[Tampered], None]:
    def tamper(record: Tampered) -> None:
        record.changed[training] = {name: change(record.arrays(training)[name])}  # type: ignore[attr-defined]

    return tamper


TAMPERINGS: dict[str, tuple[Callable[[Tampered], Any], str, int | None]] = {
    "first weights": (lambda r: _sgd(r).update(start_digest="0"), "initial weights", None),
    "a row left out": (lambda r: _sgd(r)["parts"][3].update(indices=_sgd(r)["parts"][3]["indices"][1:]), "rows", 3),
    "rows exchanged": (lambda r: _sgd(r)["parts"][3]["indices"].reverse(), "indices", 3),
    "a tensor": (lambda r: _sgd(r)["parts"][2]["digests"].__setitem__(0, "0"), "tensors received", 2),
    "a weight in the mean": (lambda r: _sgd(r)["parts"][2].update(weight=4.0), "weight", 2),
    "a loss": (lambda r: _sgd(r)["losses"].__setitem__(6, _sgd(r)["losses"][6] + 1e-9), "loss", 6),
    "a loss that is no number": (lambda r: _sgd(r)["losses"].__setitem__(6, math.nan), "loss", 6),
    "a learning rate": (lambda r: _sgd(r)["rates"].__setitem__(5, [0.0123]), "learning rate", 5),
    "a step too many": (lambda r: _sgd(r)["rates"].append([0.01]), "optimizer steps", None),
    "a step too few": (lambda r: _sgd(r)["rates"].pop(), "optimizer steps", 7),
    "another group": (lambda r: _sgd(r)["rates"].__setitem__(0, [0.05, 0.05]), "parameter groups", 0),
    "the first gradient": (_weight("5.weight", lambda w: w + 1e-9, "gradient"), "first gradient", 0),
    "a parameter": (_weight("5.weight", lambda w: w + 1e-9), "parameter", 7),
    "a parameter under the job's optimizer": (_weight("5.weight", lambda w: w + 1e-9, "user"), "parameter", 7),
    "a parameter that is no number": (_weight("5.weight", lambda w: w * np.nan), "parameter", 7),
    "a parameter of another shape": (_weight("5.weight", lambda w: w[:1]), "parameter", 7),
    "a buffer": (_weight("1.running_mean", lambda b: b + 1e-9), "buffer", 7),
    "a count": (_weight("1.num_batches_tracked", lambda b: b + 1), "buffer", 7),
    "a name": (_weight("module.5.weight", lambda b: b, "sgd"), "names of the weights", None),
    "evaluated rows": (lambda r: _sgd(r)["evaluation"].update(rows=18), "evaluation rows", None),
    "an evaluated row twice": (lambda r: _sgd(r)["evaluation"]["indices"].append(0), "evaluation rows", None),
    "a metric": (lambda r: _sgd(r)["evaluation"]["sums"].update(accuracy=99.0), "evaluation", None),
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_every_quantity_is_read(name: str, healthy: tuple[Expectation, Record]) -> None:
    expectation, record = healthy
    tamper, quantity, step = TAMPERINGS[name]
    tampered = Tampered(record)
    assert judge(expectation, tampered).verdict == "same"
    if name == "a name":
        tampered.changed["sgd"] = {"module.5.weight": np.zeros(1)}  # type: ignore[attr-defined]
    else:
        tamper(tampered)
    verdict = judge(expectation, tampered)
    assert verdict.verdict == "differs"
    assert verdict.first_divergence is not None
    assert (verdict.first_divergence["quantity"], verdict.first_divergence["step"]) == (quantity, step)
    assert verdict.first_divergence["cause"]
    json.dumps(asdict(verdict), allow_nan=False)
    assert not verdict.bitwise


def test_last_bits_cost_bitwise_but_not_same(healthy: tuple[Expectation, Record]) -> None:
    expectation, record = healthy
    tampered = Tampered(record)
    _weight("5.weight", lambda w: np.nextafter(w, np.inf))(tampered)
    verdict = judge(expectation, tampered)
    assert (verdict.verdict, verdict.bitwise) == ("same", False)
    assert verdict.max_difference is not None
    assert verdict.bound is not None
    assert 0 < verdict.max_difference < verdict.bound


@pytest.mark.parametrize(("scale", "verdict"), [("1.0", "approximate"), ("2.0", "differs")])
def test_a_lossy_engine_is_approximate_within_its_rounding(
    scale: str, verdict: str, judge_rank: Ranks, tmp_path: Path
) -> None:
    """A gradient that only the compressed path doubles: the loop is right, its numerics are not."""
    hook = "            model.register_comm_hook(None, getattr(default_hooks, compress"
    doubled = f"            scale = {scale}\n{hook}"
    fault = Fault("lossy", DDP, hook, doubled, named=(), cause="")
    source = patched(fault, tmp_path)
    file = source / "samestep" / DDP
    text = file.read_text().replace("        if compress == ", "        scale = 1.0\n        if compress == ", 1)
    file.write_text(text.replace("loss.backward()", "(loss * scale).backward()"))
    with Ranks(2, source) as ranks:
        found = prove(judge_rank, ranks, "jobs:tied", "ddp", engine_settings={"compress": "fp16"})
    assert found.verdict == verdict, found
    assert found.numerics is not None
    assert found.numerics["distance"] > 0
    assert (found.first_divergence is None) == (verdict == "approximate")


def test_numerics_that_skip_every_step_prove_nothing(ranks: Callable[[int], Ranks], judge_rank: Ranks) -> None:
    facts = engine_facts("amp", 2, {"precision": "fp16"})
    reference = judge_rank.work(reference_plan("jobs:conv", 2, None, facts))
    loop, numerics = Expectation(reference, 0), Expectation(reference, 1)
    record = Tampered(ranks(2).work(proof_plan(loop, "jobs:conv", "amp", 2, None, facts)))
    assert judge(loop, record, numerics).verdict == "approximate"
    for rank in record.ranks:
        rank["trainings"]["numerics of sgd"]["skipped_steps"] = 8
    assert judge(loop, record, numerics).verdict == "refused"


def test_a_tensor_whose_bound_says_nothing_is_named(ranks: Callable[[int], Ranks], judge_rank: Ranks) -> None:
    """AdamW makes full steps of the rounding noise that is the gradient of a bias before BatchNorm."""
    chosen = {"arch": "batchnorm", "optimizer": "adamw", "float32_only": "true"}
    found = prove(judge_rank, ranks(2), DRAWN, "ddp", chosen)
    assert found.verdict == "same", found
    assert any("ill-conditioned: 0.bias (the job's optimizer)" in note for note in found.notes), found.notes
    assert any("proven in float32, because float64 failed" in note for note in found.notes)


def test_masks_of_booleans_and_infinities_are_no_difference(ranks: Callable[[int], Ranks], judge_rank: Ranks) -> None:
    found = prove(judge_rank, ranks(2), DRAWN, "ddp", {"arch": "masked"})
    assert (found.verdict, found.bitwise) == ("same", True), found


def test_clipping_that_never_acts_is_said(ranks: Callable[[int], Ranks], judge_rank: Ranks) -> None:
    found = prove(judge_rank, ranks(2), DRAWN, "ddp", {"clip_norm": "1000.0"})
    assert found.verdict == "same"
    assert any("clipping never acted" in note for note in found.notes)
