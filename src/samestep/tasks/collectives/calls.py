"""The calls of torch.distributed, one function each: what `--show` prints is what is run.

The names of the arguments say what they hold:
    tensor    this rank's tensor; also the one that is filled, where no other is
    tensors   a list with one tensor for each rank
    out       the tensor that is filled
    outs      the list of tensors that is filled
    obj, objects, object_outs     the same with Python objects
    op        the reduction; root, peer, following, previous: ranks; group: of ranks
Where one rank gives or gets all, the list is None on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

Tensors = list[Tensor]


def all_reduce(tensor: Tensor, op: ReduceOp, group: ProcessGroup) -> None:
    dist.all_reduce(tensor, op=op, group=group)


def reduce(tensor: Tensor, root: int, op: ReduceOp, group: ProcessGroup) -> None:
    dist.reduce(tensor, dst=root, op=op, group=group)


def reduce_scatter(out: Tensor, tensors: Tensors, op: ReduceOp, group: ProcessGroup) -> None:
    dist.reduce_scatter(out, tensors, op=op, group=group)


def reduce_scatter_tensor(out: Tensor, tensor: Tensor, op: ReduceOp, group: ProcessGroup) -> None:
    dist.reduce_scatter_tensor(out, tensor, op=op, group=group)


def broadcast(tensor: Tensor, root: int, group: ProcessGroup) -> None:
    dist.broadcast(tensor, src=root, group=group)


def scatter(out: Tensor, tensors: Tensors | None, root: int, group: ProcessGroup) -> None:
    dist.scatter(out, tensors, src=root, group=group)


def gather(tensor: Tensor, outs: Tensors | None, root: int, group: ProcessGroup) -> None:
    dist.gather(tensor, outs, dst=root, group=group)


def all_gather(outs: Tensors, tensor: Tensor, group: ProcessGroup) -> None:
    dist.all_gather(outs, tensor, group=group)


def all_gather_into_tensor(out: Tensor, tensor: Tensor, group: ProcessGroup) -> None:
    dist.all_gather_into_tensor(out, tensor, group=group)


def all_to_all(outs: Tensors, tensors: Tensors, group: ProcessGroup) -> None:
    dist.all_to_all(outs, tensors, group=group)


def all_to_all_single(out: Tensor, tensor: Tensor, group: ProcessGroup) -> None:
    dist.all_to_all_single(out, tensor, group=group)


def send_recv(tensor: Tensor, peer: int, is_sender: bool, group: ProcessGroup) -> None:
    if is_sender:
        dist.send(tensor, dst=peer, group=group)
    else:
        dist.recv(tensor, src=peer, group=group)


def isend_irecv(tensor: Tensor, peer: int, is_sender: bool, group: ProcessGroup) -> None:
    if is_sender:
        work = dist.isend(tensor, dst=peer, group=group)
    else:
        work = dist.irecv(tensor, src=peer, group=group)
    # Before wait() has returned, the tensor may be neither changed nor read.
    work.wait()  # type: ignore[union-attr]  # None on a rank outside of the group


def batch_isend_irecv(tensor: Tensor, out: Tensor, following: int, previous: int, group: ProcessGroup) -> None:
    sends = dist.P2POp(dist.isend, tensor, following, group=group)
    receives = dist.P2POp(dist.irecv, out, previous, group=group)
    for work in dist.batch_isend_irecv([sends, receives]):
        work.wait()


def broadcast_object_list(objects: list[Any], root: int, group: ProcessGroup) -> None:
    dist.broadcast_object_list(objects, src=root, group=group)


def scatter_object_list(object_outs: list[Any], objects: list[Any] | None, root: int, group: ProcessGroup) -> None:
    dist.scatter_object_list(object_outs, objects, src=root, group=group)


def gather_object(obj: Any, object_outs: list[Any] | None, root: int, group: ProcessGroup) -> None:
    dist.gather_object(obj, object_outs, dst=root, group=group)


def all_gather_object(object_outs: list[Any], obj: Any, group: ProcessGroup) -> None:
    dist.all_gather_object(object_outs, obj, group=group)


def barrier(group: ProcessGroup) -> None:
    dist.barrier(group=group)


def monitored_barrier(group: ProcessGroup) -> None:
    dist.monitored_barrier(group=group)


CALLS: Mapping[str, Callable[..., None]] = {
    call.__name__: call
    for call in (
        *(all_reduce, reduce, reduce_scatter, reduce_scatter_tensor),
        *(broadcast, scatter, gather, all_gather, all_gather_into_tensor, all_to_all, all_to_all_single),
        *(send_recv, isend_irecv, batch_isend_irecv),
        *(broadcast_object_list, scatter_object_list, gather_object, all_gather_object),
        *(barrier, monitored_barrier),
    )
}
