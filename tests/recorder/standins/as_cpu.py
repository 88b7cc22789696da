"""Lets a script that names CUDA run on CPUs, unedited: its devices are the CPU, and nccl is gloo.

Imported before the script. Every call of torch that names a CUDA device gets the CPU instead.
"""

import collections
import functools
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

CUDA = torch.device("cuda")
SILENT = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "manual_seed", "manual_seed_all")


def on_cpu(value):
    """Returns the CPU for what names a CUDA device; all else as it is."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value


class AsCpu(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {key: on_cpu(value) for key, value in (kwargs or {}).items()}
        if function is torch.Tensor.to:
            args = [args[0], *("cpu" if type(each) is int else on_cpu(each) for each in args[1:])]
        elif function is torch.Tensor.cuda or function is torch.Tensor.pin_memory:
            return args[0]
        else:
            args = [on_cpu(each) if isinstance(each, torch.device) else each for each in args]
        return function(*args, **kwargs)


def devices() -> int:
    return max(2, int(os.environ.get("LOCAL_WORLD_SIZE", 2)))


def changed(of, name, **new):
    """Replaces a function by one that gets other keyword arguments, computed from its own."""
    was = getattr(of, name)

    @functools.wraps(was)
    def other(*args, **kwargs):
        return was(*args, **kwargs | {key: each(kwargs.get(key)) for key, each in new.items()})

    setattr(of, name, other)


def gloo(backend):
    return "gloo" if backend in (None, "nccl") or "cuda" in str(backend) else backend


def init_process_group(backend=None, *args, device_id=None, was=dist.init_process_group, **kwargs):
    return was(gloo(backend), *args, **kwargs)


class Done:
    """What an operation that has ended returns in the place of one that goes on."""

    def wait(self, *_):
        return True

    def get_future(self):
        return self


def reduce_scatter_tensor(
    output, input, op=dist.ReduceOp.SUM, group=None, async_op=False, was=dist.reduce_scatter_tensor
):
    was(output, input, dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op, group)
    if op == dist.ReduceOp.AVG:
        output.div_(dist.get_world_size(group))
    return Done()


def all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False, was=dist.all_gather_into_tensor):
    was(output_tensor, input_tensor, group)
    return Done()


def module_to(self, *args, was=torch.nn.Module.to, **kwargs):
    args = ["cpu" if type(each) is int else on_cpu(each) for each in args]
    return was(self, *args, **{key: on_cpu(value) for key, value in kwargs.items()})


def ddp_init(self, module, device_ids=None, output_device=None, *args, was=DistributedDataParallel.__init__, **kwargs):
    was(self, module, None, None, *args, **kwargs)


def data_parallel_init(self, module, *_, **__):
    torch.nn.Module.__init__(self)
    self.module, self.device_ids = module, []


class Event:
    def __init__(self, *_, **__): ...
    def record(self, *_): ...
    def synchronize(self): ...

    def elapsed_time(self, _):
        return 1.0


class Properties:
    total_memory, name, major, minor = 1 << 34, "CPU", 0, 0


for name in SILENT:
    setattr(torch.cuda, name, lambda *_, **__: None)
torch.cuda.is_available = lambda: True
torch.cuda.is_bf16_supported = lambda *_, **__: True
torch.cuda.device_count = devices
torch.cuda.current_device = lambda: 0
torch.cuda.Event = Event
torch.cuda.get_device_properties = lambda *_: Properties
torch.cuda.memory_stats = lambda *_: collections.defaultdict(int)
torch.cuda.max_memory_allocated = torch.cuda.memory_allocated = lambda *_: 0
torch.cuda.get_rng_state_all = list
torch.cuda.get_device_capability = lambda *_: (0, 0)
torch.accelerator.is_available = lambda: True
torch.accelerator.device_count = devices
torch.accelerator.current_accelerator = lambda check_available=False: (
    None if check_available else CUDA
)  # None: torch asks
torch.accelerator.set_device_index = torch.accelerator.device_index = lambda *_: None
torch.accelerator.synchronize = lambda *_: None
dist.init_process_group = init_process_group
# gloo's have no future.
dist.reduce_scatter_tensor, dist.all_gather_into_tensor = reduce_scatter_tensor, all_gather_into_tensor
torch.nn.Module.to = module_to
torch.nn.Module.cuda = lambda self, *_: self
torch.nn.SyncBatchNorm.convert_sync_batchnorm = staticmethod(lambda module, *_: module)  # has no CPU kernel
DistributedDataParallel.__init__ = ddp_init
torch.nn.DataParallel.__init__ = data_parallel_init
changed(torch, "load", map_location=on_cpu)
changed(torch.utils.data.DataLoader, "__init__", pin_memory=lambda _: False)
mesh_init = torch.distributed.device_mesh.DeviceMesh.__init__


def device_mesh_init(self, device_type, *args, **kwargs):
    mesh_init(self, on_cpu(device_type), *args, **kwargs)


torch.distributed.device_mesh.DeviceMesh.__init__ = device_mesh_init
AsCpu().__enter__()
