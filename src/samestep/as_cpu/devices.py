"""Gives the CPU to what names a CUDA device: in functions of torch, modules, loaders, saved files and generators."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from samestep.as_cpu import replaced
from samestep.errors import UserError
from samestep.message import message
from samestep.rank.hooks import Hooks

CPU = torch.device("cpu")
TENSOR_TYPE = "torch.cuda."


def on_cpu(value: Any) -> Any:
    """Returns the CPU for what names a CUDA device; all else as it is. A number may mean something else."""
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    return value


def device_on_cpu(value: Any) -> Any:
    """Returns the CPU for a CUDA device, or the number of one."""
    return CPU if type(value) is int else on_cpu(value)


class CpuMode(TorchFunctionMode):
    """Gives the CPU to functions of torch that are called with a CUDA device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if stand_in := STAND_INS.get(func):
            return stand_in(*args, **(kwargs or {}))
        if kwargs and "device" in kwargs:
            kwargs = {**kwargs, "device": device_on_cpu(kwargs["device"])}
        if any(isinstance(value, (torch.device, str)) for value in args):
            args = [on_cpu(value) for value in args]
        return func(*args, **(kwargs or {}))


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    first = [device_on_cpu(value) for value in args[:1]]
    if "device" in kwargs:
        kwargs["device"] = device_on_cpu(kwargs["device"])
    return tensor.to(*first, *args[1:], **kwargs)


def _itself(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return tensor


def _type(tensor: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    if isinstance(dtype, str):
        dtype = dtype.replace(TENSOR_TYPE, "torch.")
    return tensor.type(dtype, *args, **kwargs) if dtype is not None else tensor.type()


def _device(*args: Any, **kwargs: Any) -> torch.device:
    """Returns a device as a script names it: what is made there goes to the CPU."""
    if len(args) == 1 and type(args[0]) is int and not kwargs:
        return torch.device("cuda", args[0])
    return torch.device(*args, **kwargs)


STAND_INS: dict[Any, Callable[..., Any]] = {
    torch.device: _device,
    torch.Tensor.to: _to,
    torch.Tensor.cuda: _itself,
    torch.Tensor.pin_memory: _itself,
    torch.Tensor.type: _type,
}


class _AnyGenerator(type(torch._C.Generator)):  # type: ignore[misc]
    """The type of generators, also of those that torch makes itself."""

    def __instancecheck__(cls, instance: object) -> bool:
        return type.__instancecheck__(torch._C.Generator, instance)


class CpuGenerator(torch._C.Generator, metaclass=_AnyGenerator):
    """A generator of random numbers. device: where it would be."""

    def __new__(cls, device: Any = "cpu") -> CpuGenerator:
        return super().__new__(cls, device_on_cpu(device))  # type: ignore[call-arg]


def attach(hooks: Hooks) -> None:
    """Gives the CPU to what this process, and the threads that it starts, call with a CUDA device."""
    CpuMode().__enter__()  # type: ignore[no-untyped-call]
    hooks.attach(threading.Thread, "run", _run_thread)
    torch.Generator = CpuGenerator  # type: ignore[misc]
    hooks.attach(nn.Module, "to", _module_to)
    hooks.attach(Tensor, "record_stream", lambda *_: None)
    hooks.attach(torch, "set_default_device", lambda call, device: call(on_cpu(device)))
    hooks.attach(torch, "set_default_tensor_type", _set_default_tensor_type)
    hooks.attach(torch, "load", _load)
    for storage in (torch.UntypedStorage, torch.TypedStorage):
        for name in ("cuda", "pin_memory"):
            hooks.attach(storage, name, lambda _, own, *args, **kwargs: own)
    hooks.attach(DataLoader, "__init__", _init_loader)
    hooks.attach(DistributedDataParallel, "__init__", _init_ddp)
    # It refuses SyncBatchNorm on CPUs.
    hooks.attach(DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda *_: None)
    hooks.attach(nn.DataParallel, "__init__", _init_data_parallel)
    hooks.attach_after_import(
        "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "__init__", _with_device_id
    )
    hooks.attach_after_import("torch.distributed.device_mesh", "DeviceMesh", "__init__", _init_mesh)
    hooks.attach(torch.autocast, "__init__", _init_autocast)
    hooks.attach(torch, "compile", _compile)
    hooks.attach(nn.Module, "compile", lambda _, module, *args, **kwargs: replaced.note("compile"))
    # DTensor has no rule for the CPU's own kernels of attention.
    hooks.after_import("torch.distributed.tensor.parallel", _compute_attention_plainly)
    hooks.after_import("torch.nn.attention", functools.partial(_patch_attention, hooks))


def _run_thread(run: Any, thread: threading.Thread) -> None:
    # The modes of torch are each thread's own.
    with CpuMode():
        run(thread)


def _module_to(to: Any, module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    first = [device_on_cpu(value) for value in args[:1]]
    if "device" in kwargs:
        kwargs["device"] = device_on_cpu(kwargs["device"])
    return to(module, *first, *args[1:], **kwargs)  # type: ignore[no-any-return]


def _set_default_tensor_type(call: Any, kind: Any) -> None:
    call(kind.replace(TENSOR_TYPE, "torch.") if isinstance(kind, str) else kind)


def _load(load: Any, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Loads a file; what was saved on a GPU, or is to go to one, comes to the CPU."""
    if callable(map_location):
        location = map_location
    else:
        named = isinstance(map_location, (str, torch.device)) and on_cpu(map_location) == map_location
        location = map_location if named else CPU
    return load(f, location, *args, **kwargs)


def _init_loader(init: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
    if "pin_memory" in kwargs:
        kwargs["pin_memory"] = False
    kwargs.pop("pin_memory_device", None)
    init(loader, *args, **kwargs)


def _init_ddp(
    init: Any,
    model: Any,
    module: nn.Module,
    device_ids: Any = None,
    output_device: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    init(model, module, None, None, *args, **kwargs)


def _init_data_parallel(_: Any, model: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Makes a model that one device computes, as torch does where there is no GPU. Raises UserError in a launch of
    several ranks, each of which would train alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        raise UserError(message("data_parallel_is_one_process"))
    replaced.note("data_parallel")
    nn.Module.__init__(model)
    model.module, model.device_ids = module, []


def _with_device_id(init: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    if kwargs.get("device_id") is not None:
        kwargs["device_id"] = CPU
    init(model, *args, **kwargs)


def _init_mesh(init: Any, mesh: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
    init(mesh, on_cpu(device_type), *args, **kwargs)


def _init_autocast(
    init: Any, autocast: Any, device_type: str, dtype: Any = None, enabled: bool = True, *args: Any, **kwargs: Any
) -> None:
    if on_cpu(device_type) == "cpu" and enabled:
        replaced.note("autocast")
        enabled = False
    init(autocast, device_type, dtype, enabled, *args, **kwargs)


def _compile(_: Any, model: Any = None, **kwargs: Any) -> Any:
    """Returns what computes the same without compiling it."""
    replaced.note("compile")
    if model is None:
        return lambda function: torch.compiler.disable(function)
    return torch.compiler.disable(model)


def _compute_attention_plainly() -> None:
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)


def _patch_attention(hooks: Hooks) -> None:
    """Lets torch choose the kernel of attention: a CPU has others."""
    from contextlib import nullcontext

    hooks.attach(sys.modules["torch.nn.attention"], "sdpa_kernel", lambda _, *args, **kwargs: nullcontext())
