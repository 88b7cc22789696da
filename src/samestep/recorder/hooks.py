"""The precision in which gradients reach the optimizer: communication hooks of DDP may round them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from samestep.records.script import COMPRESSED

ROUND_TO = {"fp16_compress": "float16", "bf16_compress": "bfloat16"}
LOSSY = ("powerSGD", "quantization", "post_localSGD")  # of torch's own: a mean only at first, or never


def precisions(modules: Iterable[Any], parameters: Iterable[Tensor]) -> set[str]:
    """Returns the parameters' dtypes, and those to which hooks round gradients; COMPRESSED where they lose more."""
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters}
    for module in modules:
        for hook, _ in getattr(module, "_comm_hooks", ()):
            name = getattr(hook, "__name__", "")
            dtypes |= {dtype for start, dtype in ROUND_TO.items() if name.startswith(start)}
            dtypes |= {COMPRESSED for word in LOSSY if word in name}
    return dtypes
