"""Records the pieces of a rank, of a model that is divided over the ranks of device meshes."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from samestep.job.foreign import is_a
from samestep.job.walk import known_leaves
from samestep.rank.hooks import Hooks
from samestep.rank.shards import place_of
from samestep.records.divided_models import Kind, MeshRecord, PieceRecord

DTENSOR = "torch.distributed.tensor"


class Pieces:
    """The pieces that a rank holds: of parameters by their names, and of arrays of gradients by their kind and name."""

    def __init__(self) -> None:
        self.meshes: list[MeshRecord] = []
        self.by_name: dict[str, PieceRecord] = {}
        self.divides_inputs = False
        self._inputs: set[int] = set()  # addresses of what the present forward is given

    def note(self, name: str, tensor: Any, data: int = 0) -> None:
        """Notes which piece of a DTensor this rank holds. data: how many dimensions of the mesh are FSDP's."""
        if name in self.by_name and self.by_name[name].kinds == _kinds(tensor):
            return
        shape, offset = place_of(tensor)
        piece = PieceRecord(self._number(tensor.device_mesh), _kinds(tensor), [*offset], [*shape], data)
        self.by_name[name] = piece

    def forget(self) -> None:
        self.by_name = {}

    def _number(self, mesh: Any) -> int:
        names = mesh.mesh_dim_names or [f"dim {number}" for number in range(mesh.ndim)]
        record = MeshRecord([*names], [*mesh.mesh.shape], mesh.mesh.flatten().tolist())
        if record not in self.meshes:
            self.meshes.append(record)
        return self.meshes.index(record)

    def begin_forward(self, inputs: Any) -> None:
        """Notes the inputs of a forward, which may be given to DTensor.from_local as pieces."""
        if DTENSOR in sys.modules:
            self._inputs = {leaf.data_ptr() for leaf in known_leaves(inputs) if is_a(leaf, Tensor) and leaf.numel()}

    def attach(self, hooks: Hooks) -> None:
        """Patches DTensor.from_local."""

        def new_from_local(
            from_local: Any, local_tensor: Any, device_mesh: Any = None, placements: Any = None, **kwargs: Any
        ) -> Any:
            cut = any(hasattr(placement, "dim") for placement in placements or ())
            if cut and is_a(local_tensor, Tensor) and local_tensor.numel():
                self.divides_inputs |= local_tensor.data_ptr() in self._inputs
            return from_local(local_tensor, device_mesh, placements, **kwargs)

        hooks.attach_after_import(DTENSOR, "DTensor", "from_local", new_from_local)


def _kinds(tensor: Any) -> list[Kind]:
    return [
        "partial" if placement.is_partial() else "shard" if hasattr(placement, "dim") else "replicate"
        for placement in tensor.placements
    ]
