"""Faults of tensor, context, pipeline and expert parallelism, and of FSDP on a mesh, are caught on four ranks, as
threads; the same files without one pass.

python tests/mutations/test_divided_models.py FILE.json [WORDS]    plants all, or those with WORDS in their names
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from lane_marks import in_turn
from mutations.faults import Fault, context, expert, fsdp_mesh, pipeline, tensor
from mutations.faults.fsdp_mesh import COPIES, DIVIDED, FSDP
from mutations.faults.origins import with_origins
from mutations.faults.tensor import JOBS, MESH, TENSOR
from mutations.plant import References, plant
from planting import not_applying
from ranks import SOURCE, Ranks

SIZE = 4
FAULTS = with_origins((*tensor.FAULTS, *fsdp_mesh.FAULTS, *context.FAULTS, *pipeline.FAULTS, *expert.FAULTS))
IMPORT = "from torch import nn\n"
HEALTHY = (
    Fault("tensor: nothing", TENSOR, IMPORT, IMPORT, (), "", JOBS, engine="tensor", mesh=MESH),
    *(
        Fault("fsdp: nothing", FSDP, "import torch\n", "import torch\n", (), "", JOBS, engine="fsdp", mesh=mesh)
        for mesh in (COPIES, DIVIDED)
    ),
    tensor.HEALTHY_FUSED,
    tensor.HEALTHY_CHUNKS,
    tensor.HEALTHY_LOGITS,
    context.HEALTHY,
    expert.HEALTHY,
    pipeline.fault("nothing", pipeline.PIPELINE, "import torch\n", "import torch\n", ()),
)


@pytest.fixture(scope="module")
def references() -> Iterator[References]:
    with Ranks(1) as reference_rank:
        yield References(reference_rank, SIZE)


def test_every_fault_applies() -> None:
    assert not_applying(FAULTS, SOURCE / "samestep") == []
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 37 + 15


@pytest.mark.parametrize(
    "healthy",
    [pytest.param(fault, marks=in_turn(3, number)) for number, fault in enumerate(HEALTHY)],
    ids=[f"{healthy.engine} {healthy.mesh} {healthy.jobs[0]} {[*healthy.settings]}" for healthy in HEALTHY],
)
def test_without_a_fault_it_is_the_same_step(healthy: Fault, references: References) -> None:
    assert [row["verdict"] for row in plant(healthy, references, threads=True)] == ["same"]


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=in_turn(18, number)) for number, fault in enumerate(FAULTS)],
    ids=[fault.name for fault in FAULTS],
)
def test_a_fault_is_caught(fault: Fault, references: References) -> None:
    (row,) = plant(fault, references, threads=True)
    assert row["verdict"] in ("differs", "failed") and row.get("quantity", row["verdict"]) in fault.named, row


# One of each engine: of an axis, of a module in the forward pass, of two axes together, of a rank, and of none.
LOCATED = (
    "tensor: the parts of an output averaged, not added up",
    "fsdp: replicas of shards are sharded, and never averaged",
    "context: the gradient of keys from this rank's queries alone",
    "pipeline: a stage that does not step",
    "expert: an expert takes at most four tokens",
    "tensor: gradients averaged over all ranks, which have other parts",
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=in_turn(2, row)) for row, name in enumerate(LOCATED)])
def test_its_axis_and_its_module_are_named(name: str, references: References) -> None:
    (row,) = plant(next(fault for fault in FAULTS if fault.name == name), references, threads=True, where=True)
    assert row["axes_right"] and row["module_right"], row


def main(file: Path, words: str = "") -> None:
    with Ranks(1) as reference_rank:
        references = References(reference_rank, SIZE)
        rows = []
        for fault in (fault for fault in (*HEALTHY, *FAULTS) if words in fault.name):
            rows += plant(fault, references, threads=True, where=True)
            told = rows[-1]
            shown = ("verdict", "named", "quantity", "reason", "axes_right", "axes", "module_right", "module", "fault")
            print(*(told.get(key) for key in shown), flush=True)
            file.write_text(json.dumps(rows, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
