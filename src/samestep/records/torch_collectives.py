"""The functions of torch.distributed that ranks call together: what each one takes, and what it leaves on which rank.

What observes collectives, plays them on one rank or judges them takes their names from here. A function that this torch
does not have is attached to nothing.

Source: https://docs.pytorch.org/docs/stable/distributed.html
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# What a function does with the values of the ranks. "share": hands on what one rank has. "exchange": each rank gives
# each rank another part. "pair": two ranks, of which one sends.
Kind = Literal["reduce", "gather", "exchange", "share", "wait", "pair"]


@dataclass(frozen=True)
class TorchCollective:
    """One function.

    sent, received: the arguments with what a rank gives and gets; the same one where it is changed in place. to_all:
    whether each rank gives or gets as all others do. takes: tensors (in one argument), lists of them as one operation,
    or Python's objects.
    """

    name: str
    kind: Kind
    sent: str = ""
    received: str = ""
    to_all: bool = True
    takes: Literal["tensors", "several", "objects"] = "tensors"

    @property
    def is_in_place(self) -> bool:
        return self.sent == self.received


TORCH_COLLECTIVES = (
    TorchCollective("all_reduce", "reduce", "tensor", "tensor"),
    TorchCollective("all_reduce_coalesced", "reduce", "tensors", "tensors", takes="several"),
    TorchCollective("reduce", "reduce", "tensor", "tensor", to_all=False),
    TorchCollective("reduce_scatter", "reduce", "input_list", "output"),
    TorchCollective("reduce_scatter_tensor", "reduce", "input", "output"),
    TorchCollective("reduce_scatter_single", "reduce", "input", "output"),
    TorchCollective("all_gather", "gather", "tensor", "tensor_list"),
    TorchCollective("all_gather_into_tensor", "gather", "input_tensor", "output_tensor"),
    TorchCollective("all_gather_single", "gather", "input_tensor", "output_tensor"),
    TorchCollective("all_gather_coalesced", "gather", "input_tensor_list", "output_tensor_lists", takes="several"),
    TorchCollective("all_gather_object", "gather", "obj", "object_list", takes="objects"),
    TorchCollective("gather", "gather", "tensor", "gather_list", to_all=False),
    TorchCollective("gather_object", "gather", "obj", "object_gather_list", to_all=False, takes="objects"),
    TorchCollective("all_to_all", "exchange", "input_tensor_list", "output_tensor_list"),
    TorchCollective("all_to_all_single", "exchange", "input", "output"),
    TorchCollective("broadcast", "share", "tensor", "tensor"),
    TorchCollective("broadcast_object_list", "share", "object_list", "object_list", takes="objects"),
    TorchCollective("scatter", "share", "scatter_list", "tensor", to_all=False),
    TorchCollective(
        "scatter_object_list", "share", "scatter_object_input_list", "scatter_object_output_list", takes="objects"
    ),
    TorchCollective("barrier", "wait"),
    TorchCollective("monitored_barrier", "wait"),
    TorchCollective("send", "pair", "tensor"),
    TorchCollective("isend", "pair", "tensor"),
    TorchCollective("recv", "pair", received="tensor"),
    TorchCollective("irecv", "pair", received="tensor"),
    TorchCollective("batch_isend_irecv", "pair", "p2p_op_list", "p2p_op_list", takes="several"),
    TorchCollective("send_object_list", "pair", "object_list", takes="objects"),
    TorchCollective("recv_object_list", "pair", received="object_list", takes="objects"),
)
COLLECTIVES = [function for function in TORCH_COLLECTIVES if function.kind != "pair"]  # of all ranks of a group
SENDS_AND_RECEIVES = [function for function in TORCH_COLLECTIVES if function.kind == "pair"]
OF_TENSORS = [function for function in COLLECTIVES if function.sent and function.takes != "objects"]
OF_ONE_TENSOR = [function for function in OF_TENSORS if function.takes == "tensors"]
# A model that ranks share out computes with these: each rank has the result.
TO_ALL = [function for function in OF_TENSORS if function.to_all]
WITH_HISTORY = "_autograd"  # ends the recorded name of an operation whose result autograd knows


def exchanges_parts(name: str) -> bool:
    """Whether a recorded operation gives ranks what other ranks do not get. Functional collectives are named as those
    of torch.distributed, with an ending."""
    exchanges = [function.name for function in TORCH_COLLECTIVES if function.kind in ("exchange", "pair")]
    return name.startswith((*exchanges, "permute_tensor"))


def returns_without_history(name: str) -> bool:
    """Whether a recorded operation hands back tensors that autograd does not know: one that does not change what it is
    given, and whose name does not end as those do that have a gradient."""
    others = [function.name for function in TO_ALL if not function.is_in_place]
    return name.startswith((*others, "all_gather_tensor", "permute_tensor")) and not name.endswith(WITH_HISTORY)
