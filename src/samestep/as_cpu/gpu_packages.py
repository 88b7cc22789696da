"""Stands for packages of GPU kernels that are not installed, by torch's own operations: apex, flash_attn, xformers and
bitsandbytes' optimizers."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from samestep.as_cpu import replaced
from samestep.world.imports import is_users_code


def attach() -> None:
    """Lets a script import these packages, where they are not installed."""
    sys.meta_path.append(_Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages after all other finders, for the script alone."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in PACKAGES or not _is_imported_by_script():
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        package = module.__name__
        replaced.note(package.partition(".")[0])
        vars(module).update(PACKAGES[package])
        module.__getattr__ = functools.partial(_missing, package)  # type: ignore[method-assign]


def _missing(package: str, name: str) -> Any:
    """Returns what a package is asked for and does not hold: a package in it. Raises UserError for all else."""
    if name.startswith("__"):
        raise AttributeError(name)
    if f"{package}.{name}" not in PACKAGES:
        replaced.refuse(f"{package}.{name}")
    return importlib.import_module(f"{package}.{name}")


def _is_imported_by_script() -> bool:
    """Returns whether the script's own code imports, and no library that only looks whether a package is there."""
    frame = sys._getframe(2)
    while "importlib" in frame.f_code.co_filename and frame.f_back:
        frame = frame.f_back
    return frame.f_globals.get("__name__") == __name__ or is_users_code(frame.f_code.co_filename)


class _ApexParallel(DistributedDataParallel):
    """apex.parallel.DistributedDataParallel."""

    def __init__(self, module: nn.Module, message_size: int = 0, delay_allreduce: bool = False, **_: Any) -> None:
        super().__init__(module)


@contextmanager
def _scale_loss(loss: Any, optimizers: Any, *_: Any, **__: Any) -> Iterator[Any]:
    yield loss


def _initialize(models: Any, optimizers: Any = None, *_: Any, **__: Any) -> Any:
    return models if optimizers is None else (models, optimizers)


def _fused_adam(params: Any, lr: float = 1e-3, *, adam_w_mode: bool = True, **settings: Any) -> torch.optim.Optimizer:
    for name in ("bias_correction", "set_grad_none", "capturable", "master_weights"):
        settings.pop(name, None)
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    settings.setdefault("weight_decay", 0.0)
    return kind(params, lr=lr, **settings)


def _fused_sgd(params: Any, lr: float, **settings: Any) -> torch.optim.Optimizer:
    for name in ("wd_after_momentum", "materialize_master_grads", "set_grad_none"):
        settings.pop(name, None)
    return torch.optim.SGD(params, lr=lr, **settings)


def _in_whole_numbers(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Returns a maker of torch's optimizer for one whose state has 8 bits."""

    def make(params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8, **settings: Any) -> Any:
        decay = 1e-2 if kind is torch.optim.AdamW else 0.0
        return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=settings.get("weight_decay", decay))  # type: ignore[call-arg]

    return make


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **settings: Any,
) -> Tensor:
    """flash_attn_func: tensors of [batch, length, heads, size]; fewer heads of k and v are shared."""
    if given := [name for name, value in settings.items() if value not in (None, False, 0.0, (-1, -1))]:
        replaced.refuse(f"flash_attn_func(…, {given[0]})")
    queries, keys, values = (tensor.transpose(1, 2) for tensor in (q, k, v))
    mask = None
    if causal and q.shape[1] != k.shape[1]:  # aligned to the lower right
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    return functional.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=causal and mask is None,
        scale=softmax_scale,
        enable_gqa=queries.shape[1] != keys.shape[1],
    ).transpose(1, 2)


def _apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, **settings: Any) -> Tensor:
    """apply_rotary_emb: x of [batch, length, heads, size], cos and sin of [length, half of the size that turns]."""
    if any(value not in (None, False, 0) for value in settings.values()):
        replaced.refuse("apply_rotary_emb with offsets or lengths")
    size = 2 * cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    cos, sin = (table[: x.shape[1]].unsqueeze(-2) for table in (cos, sin))
    parts = first * cos - second * sin, first * sin + second * cos
    whole = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    return torch.cat([whole, rest], dim=-1)


def _packed_attention(qkv: Tensor, *args: Any, **settings: Any) -> Tensor:
    """flash_attn_qkvpacked_func: a tensor of [batch, length, 3, heads, size]."""
    queries, keys, values = qkv.unbind(2)
    return _attention(queries, keys, values, *args, **settings)


def _kernel(function: Any = None, *_: Any, **__: Any) -> Any:
    """triton.jit, and decorators with settings: a kernel that is refused when it is launched."""
    if function is None or not callable(function):
        return _kernel
    launched = functools.partial(replaced.refuse, f"the Triton kernel {getattr(function, '__name__', '')}")
    return _Kernel(launched)


class _Kernel:
    """A kernel, launched as kernel[grid](…)."""

    def __init__(self, launched: Callable[..., Any]) -> None:
        self._launched = launched

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return self._launched


class _LowerTriangularMask:
    """xformers' causal mask."""


def _efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    **_: Any,
) -> Tensor:
    """xformers.ops.memory_efficient_attention: tensors of [batch, length, heads, size], or without heads."""
    has_heads = query.dim() == 4
    queries, keys, values = (tensor.transpose(1, 2) if has_heads else tensor for tensor in (query, key, value))
    causal = isinstance(attn_bias, _LowerTriangularMask)
    attended = functional.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=None if causal else attn_bias,
        dropout_p=p,
        is_causal=causal,
        scale=scale,
    )
    return attended.transpose(1, 2) if has_heads else attended


ATTENTION = {
    "flash_attn_func": _attention,
    "flash_attn_qkvpacked_func": _packed_attention,
    "__version__": "2.0.0",
}
ADAMS = {
    f"{paged}{name}{bits}": _in_whole_numbers(kind)
    for name, kind in (("Adam", torch.optim.Adam), ("AdamW", torch.optim.AdamW))
    for paged in ("", "Paged")
    for bits in ("", "8bit", "32bit")
}
PACKAGES: Mapping[str, Mapping[str, Any]] = {
    "apex": {},
    "apex.amp": {
        "initialize": _initialize,
        "scale_loss": _scale_loss,
        "master_params": lambda optimizer: (
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ),
    },
    "apex.parallel": {
        "DistributedDataParallel": _ApexParallel,
        "SyncBatchNorm": nn.SyncBatchNorm,
        "convert_syncbn_model": nn.SyncBatchNorm.convert_sync_batchnorm,
    },
    "apex.fp16_utils": {},
    "apex.optimizers": {"FusedAdam": _fused_adam, "FusedSGD": _fused_sgd},
    "apex.normalization": {"FusedLayerNorm": nn.LayerNorm, "FusedRMSNorm": nn.RMSNorm},
    "flash_attn": ATTENTION,
    "flash_attn.flash_attn_interface": ATTENTION,
    "flash_attn.layers": {},
    "flash_attn.layers.rotary": {"apply_rotary_emb": _apply_rotary},
    "flash_attn.ops": {},
    "flash_attn.ops.triton": {},
    "flash_attn.ops.triton.layer_norm": {},
    "xformers": {"__version__": "0.0.0"},
    "xformers.ops": {
        "memory_efficient_attention": _efficient_attention,
        "LowerTriangularMask": _LowerTriangularMask,
        "unbind": lambda tensor, dim: tensor.unbind(dim),
    },
    "triton": {"jit": _kernel, "autotune": _kernel, "__version__": "0.0.0"},
    "triton.language": {"constexpr": int},
    "bitsandbytes": {"__version__": "0.0.0"},
    "bitsandbytes.optim": ADAMS,
}
