"""Stands for the names of torch.cuda and torch.accelerator, on a machine whose GPUs are one CPU for each rank."""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace, TracebackType
from typing import Any

import psutil
import torch

from samestep.as_cpu import replaced
from samestep.as_cpu.devices import CPU
from samestep.rank.hooks import Hooks, called_by_torch

CUDA = torch.device("cuda")
# Functions that return nothing.
SILENT = (
    *("init", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "reset_accumulated_memory_stats"),
    *("reset_max_memory_allocated", "reset_max_memory_cached", "set_per_process_memory_fraction", "set_stream"),
    *("set_sync_debug_mode", "reset_peak_host_memory_stats", "reset_accumulated_host_memory_stats"),
)
ZERO = (
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached"),
    *("max_memory_cached", "memory_usage", "utilization", "temperature", "power_draw", "clock_rate"),
    *("device_memory_used", "get_sync_debug_mode"),
)
REFUSED = ("CUDAGraph", "graph", "MemPool", "CUDAPluggableAllocator", "jiterator")


class Device:
    """The device that a process has chosen."""

    current = 0


def device_count() -> int:
    """Returns the number of devices: as many as this machine's ranks; without a launcher, as the user makes visible."""
    visible = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    return int(os.environ.get("LOCAL_WORLD_SIZE", len(visible) or 1))


def set_device(device: Any) -> None:
    """Chooses the device of this process. Raises RuntimeError where there is none of that number, as on GPUs."""
    index = device if isinstance(device, int) else torch.device(device).index
    if index is None or index < 0:
        return
    if index >= device_count():
        raise RuntimeError("CUDA error: invalid device ordinal")
    Device.current = index


def exchange_device(index: int) -> int:
    """Chooses a device as set_device does. Returns the one before."""
    before = Device.current
    Device.current = index if index >= 0 else before
    return before


class CpuStream:
    """A stream whose work has always ended: on a CPU each operation ends before the next begins."""

    cuda_stream = stream_id = 0
    device, priority, device_index, device_type = CPU, 0, 0, 1

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self, *_: Any) -> None:
        pass

    wait_stream = wait_event = synchronize

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or CpuEvent()

    def __enter__(self) -> CpuStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class CpuEvent:
    """An event that has happened. The time between two is 1 ms: no time on a CPU is that of a GPU."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    synchronize = wait = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0


def attach(hooks: Hooks) -> None:
    """Replaces the names of torch.cuda and torch.accelerator."""
    for name, answer in _answers().items():
        owners = [getattr(torch.cuda, room) for room in ("memory", "random", "streams")]
        hooks.attach(torch.cuda, name, functools.partial(_call, answer), *owners)
    for name in REFUSED:
        if hasattr(torch.cuda, name):
            # A class, as libraries name it in their annotations.
            refused = type(name, (), {"__init__": functools.partialmethod(_refuse, f"torch.cuda.{name}")})
            setattr(torch.cuda, name, refused)
    for name in ("Stream", "ExternalStream"):
        setattr(torch.cuda, name, CpuStream)
    torch.cuda.Event = CpuEvent  # type: ignore[assignment, misc]
    for name in [name for name in dir(torch.cuda) if name.endswith("Tensor")]:
        setattr(torch.cuda, name, getattr(torch, name))
    for name in ("range_push", "range_pop", "mark", "range"):
        hooks.attach(torch.cuda.nvtx, name, lambda _, *args, **kwargs: CpuStream())
    hooks.attach(torch.cuda.nccl, "version", lambda _: (2, 0, 0))
    # What is left asks for CUDA when it is called.
    hooks.attach(torch.cuda, "_lazy_init", _refuse_caller)
    for name, answer in _accelerator_answers().items():
        hooks.attach(torch.accelerator, name, functools.partial(_call, answer))


def _call(answer: Callable[..., Any], _: Any, *args: Any, **kwargs: Any) -> Any:
    return answer(*args, **kwargs)


def _refuse(_: Any, name: str, *args: Any, **kwargs: Any) -> None:
    replaced.refuse(name)


def _refuse_caller(_: Any) -> None:
    from samestep.rank.hooks import calling_frame

    replaced.refuse(f"torch.cuda.{calling_frame().f_code.co_name}")


def _answers() -> dict[str, Callable[..., Any]]:
    """Returns the functions that stand for those of torch.cuda, by their names."""
    total = psutil.virtual_memory().total
    properties = SimpleNamespace(
        name="CPU", major=8, minor=0, total_memory=total, multi_processor_count=1, is_integrated=0, is_multi_gpu_board=0
    )
    generator = torch.default_generator
    answers: dict[str, Callable[..., Any]] = {name: _nothing for name in SILENT}
    answers |= {name: lambda *_, **__: 0 for name in ZERO}
    answers |= {
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "is_tf32_supported": lambda: True,
        "device_count": device_count,
        "set_device": set_device,
        "current_device": lambda: Device.current,
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "get_device_name": lambda *_: "CPU",
        "get_device_capability": lambda *_: (8, 0),
        "get_device_properties": lambda *_: properties,
        "get_arch_list": list,
        "can_device_access_peer": lambda *_: True,
        "mem_get_info": lambda *_: (psutil.virtual_memory().available, total),
        "memory_stats": lambda *_: defaultdict(int),
        "memory_summary": lambda *_, **__: "",
        "memory_snapshot": lambda *_, **__: [],
        "list_gpu_processes": lambda *_: "",
        "current_stream": CpuStream,
        "default_stream": CpuStream,
        "stream": lambda stream: CpuStream(),
        "is_current_stream_capturing": lambda: False,
        "make_graphed_callables": lambda callables, *_, **__: callables,
        # The random numbers of the GPU are drawn by the CPU's generator.
        "manual_seed": lambda seed: generator.manual_seed(int(seed)) and None,
        "manual_seed_all": lambda seed: generator.manual_seed(int(seed)) and None,
        "seed": lambda: generator.seed() and None,
        "seed_all": lambda: generator.seed() and None,
        "initial_seed": generator.initial_seed,
        "get_rng_state": lambda *_: generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state() for _ in range(device_count())],
        "set_rng_state": lambda state, *_, **__: generator.set_state(state) and None,
        "set_rng_state_all": lambda states: generator.set_state(states[Device.current]) and None,
    }
    return answers


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _accelerator_answers() -> dict[str, Callable[..., Any]]:
    """Returns the functions that stand for those of torch.accelerator. torch itself is told that there is none."""
    answers: dict[str, Callable[..., Any]] = {
        name: _nothing for name in ("set_device_idx", "set_device_index", "synchronize", "set_stream", "empty_cache")
    }
    return answers | {
        "is_available": lambda: not called_by_torch(),
        "device_count": device_count,
        "current_accelerator": lambda check_available=False: None if called_by_torch() else CUDA,
        "current_device_index": lambda: Device.current,
        "current_device_idx": lambda: Device.current,
        "device_index": lambda *_: CpuStream(),
        "current_stream": CpuStream,
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "memory_stats": lambda *_: defaultdict(int),
    }
