"""--check-replicas: ranks whose weights have drifted apart are found, named, and end the training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from command import TESTS, samestep
from ranks import skip_unless_here
from said import says
from samestep.rank.digests import bytes_of, digest_rows, digests
from samestep.records.files import read
from samestep.records.record import RankError

JOB = f"{TESTS}/rank/poisoned.py:job"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bit_changes_a_digest_and_taking_it_changes_nothing(dtype: torch.dtype) -> None:
    tensor = (torch.randn(300_000, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    kept = tensor.clone()
    (before,) = digests({"x": tensor})
    assert torch.equal(tensor, kept)
    assert digests({"x": tensor.clone()}) == [before]
    seen = {before}
    for place in (0, 131_071, 131_072, 299_999):  # about a block's end, too
        changed = kept.clone()
        changed.view(torch.uint8)[place * changed.element_size()] ^= 1
        seen.update(digests({"x": changed}))
    swapped = kept.clone()
    swapped[[0, 1]] = kept[[1, 0]]
    assert len(seen | {*digests({"x": swapped})}) == 6


def test_tensors_of_odd_forms_have_digests() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    of = digests({"empty": torch.zeros(0), "scalar": torch.tensor(1.5), "whole": whole, "turned": whole.t()})
    assert len(set(of)) == 4
    assert digests({"x": whole.t().contiguous()}) == of[3:]


def test_one_element_that_was_expanded_has_bytes() -> None:
    one = torch.tensor(1.5, dtype=torch.float64)
    assert torch.equal(bytes_of(one.expand(1)), bytes_of(one))
    assert digest_rows([one.expand(1), torch.ones(3, 1)[:1].expand(1, 1)], 1) == digest_rows(
        [one[None], torch.ones(1, 1)], 1
    )


@pytest.mark.parametrize(
    ("engine", "drifts", "options", "step"),
    [
        ("ddp", 1, ["--check-replicas", "1"], 1),
        pytest.param("ddp", 1, [], 5, marks=pytest.mark.check),  # at the end
        pytest.param("accelerate", 2, ["--check-replicas", "2"], 3, marks=pytest.mark.check),
        pytest.param("zero", 2, ["--check-replicas", "1"], None, marks=pytest.mark.check),  # its owner's value is sent
        pytest.param("ddp", 1, ["--check-replicas", "0"], None, marks=pytest.mark.check),
    ],
)
def test_a_rank_that_drifts_is_named(
    engine: str, drifts: int, options: list[str], step: int | None, tmp_path: Path
) -> None:
    """Rank 1's last.weight is moved by 1e-9 in the forward pass after step `drifts`."""
    skip_unless_here(engine)
    line = ["run", JOB, "--engine", engine, "--nproc", "2", "--set", f"drifts={drifts - 1}", *options]
    done = samestep(*line, out=tmp_path / "out")
    if step is None:
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 1, done.stderr
    (error,) = (tmp_path / "out").rglob("error-rank1.json")
    says(read(RankError, error).message, "replicas_differ", step=step, parameter="last.weight", ranks=[1])
    assert f"by step {step}: last.weight" in done.stderr, done.stderr
    assert not (tmp_path / "out" / "weights.safetensors").exists()
