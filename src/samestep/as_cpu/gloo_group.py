"""Lets gloo do what scripts ask of NCCL: its names, means in place of sums, lists of all_to_all, futures."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.as_cpu import replaced
from samestep.rank.hooks import Hooks

C10D = "torch.distributed.distributed_c10d"
# Collectives that take a ReduceOp.
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_reduce_coalesced")
# gloo's handle of these has no future.
WITHOUT_FUTURE = ("reduce_scatter_tensor", "all_gather_into_tensor", "reduce_scatter")


class Done:
    """The handle of a collective that has ended."""

    def __init__(self, result: Any = None) -> None:
        self._result = result

    def wait(self, *_: Any, **__: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> Any:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


def attach(hooks: Hooks) -> None:
    """Replaces the functions of torch.distributed that name NCCL, or that gloo cannot do."""
    module = sys.modules[C10D]
    hooks.attach(dist, "init_process_group", _init_process_group, module)
    hooks.attach(dist, "new_group", _with_gloo, module)
    hooks.attach(dist, "new_subgroups_by_enumeration", _with_gloo, module)
    hooks.attach(dist, "new_subgroups", _with_gloo, module)
    hooks.attach(dist, "is_nccl_available", lambda _: True, module)
    hooks.attach(dist, "barrier", _barrier, module)
    hooks.attach(dist, "monitored_barrier", _monitored_barrier, module)
    for name in dict.fromkeys((*REDUCING, *WITHOUT_FUTURE)):
        hooks.attach(dist, name, _reduce, module)
    hooks.attach(dist, "all_to_all", _all_to_all, module)


def gloo(backend: Any) -> Any:
    """Returns gloo for what names NCCL, as in 'cpu:gloo,cuda:nccl'; other backends as they are."""
    if backend is None or not isinstance(backend, str):
        return "gloo" if backend is None else backend
    if "nccl" in backend.lower() or "cuda" in backend.lower():
        replaced.note("nccl")
        return "gloo"
    return backend


def _init_process_group(init: Any, backend: Any = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
    kwargs.pop("pg_options", None)
    init(gloo(backend), *args, **kwargs)


def _with_gloo(make: Any, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("device_id", None)
    if kwargs.get("backend") is not None:
        kwargs["backend"] = gloo(kwargs["backend"])
    if kwargs.pop("pg_options", None) is not None:
        replaced.note("nccl")
    return make(*args, **kwargs)


def _barrier(barrier: Any, group: Any = None, async_op: bool = False, device_ids: Any = None, **kwargs: Any) -> Any:
    return barrier(group, async_op, **kwargs)


def _monitored_barrier(barrier: Any, *args: Any, **kwargs: Any) -> Any:
    return barrier(*args, **kwargs)


def _reduce(collective: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a collective; a mean as a sum, which is divided. The handle of one that is not waited for has ended."""
    given = inspect.signature(collective._function).bind(*args, **kwargs)
    op, is_async = given.arguments.get("op"), given.arguments.get("async_op", False)
    is_mean = op == dist.ReduceOp.AVG
    if not is_mean and not (is_async and collective._function.__name__ in WITHOUT_FUTURE):
        return collective(*args, **kwargs)
    given.arguments["async_op"] = False
    if is_mean:
        given.arguments["op"] = dist.ReduceOp.SUM
    collective(*given.args, **given.kwargs)
    reduced = next(iter(given.arguments.values()))
    tensors: list[Tensor] = [reduced] if isinstance(reduced, Tensor) else [*reduced]
    if is_mean:
        size = dist.get_world_size(given.arguments.get("group"))
        for tensor in tensors:
            tensor.div_(size)
    return Done(tensors) if is_async else None


def _all_to_all(
    _: Any, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: Any = None, async_op: bool = False
) -> Any:
    """Sends a tensor to each rank, as one tensor of all."""
    received = torch.cat([tensor.reshape(-1) for tensor in output_tensor_list])
    received_sizes = [tensor.numel() for tensor in output_tensor_list]
    sent_sizes = [tensor.numel() for tensor in input_tensor_list]
    sent = torch.cat([tensor.reshape(-1) for tensor in input_tensor_list])
    dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=group)
    for tensor, part in zip(output_tensor_list, received.split(received_sizes)):
        tensor.copy_(part.view_as(tensor))
    return Done(output_tensor_list) if async_op else None
