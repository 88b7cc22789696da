"""Names the module with which a difference begins, from what modules return and from the tensors that differ.

The ranks' parts of an output are put together without knowing how it is divided: all values of a step, in ascending
order, are those of the one model, as often as there are copies. In the forward pass the first module whose output
differs is the nearest to what is wrong; in the backward pass, which goes the other way, the last one whose gradient
does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from samestep.bounds import FIRST_FORWARD_APART
from samestep.job.module_outputs import LATER_CALL, ZEROS
from samestep.message import Message, message
from samestep.proof.compare import PART
from samestep.proof.trace import Trace
from samestep.records.results import Divergence

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Outputs = Mapping[str, NDArray[Any]]

MOST_COPIES = 64  # the most outputs of a module, on a rank
OF_TENSORS = (
    "initial weights",
    "first gradient",
    "parameter",
    "buffer",
    "replicas",
)  # the quantities that name tensors
# The quantities that a rank computes of all tensors.
OF_RANKS = ("learning rate", "optimizer steps", "parameter groups")


def module_of(
    differences: Sequence[Divergence],
    observed: Trace,
    trained: Sequence[str],
    expected: Outputs,
    found: Sequence[Outputs],
) -> tuple[str, Message | None]:
    """Returns the module with which a difference begins, and the message about it; '' and None where no module can be
    told from the others.

    differences: all of one training, the first one first. observed: the training. trained: the parameters that move, in
    the model's order. expected: module -> its values, in the order of the forward pass; empty where none were noted.
    found: the same of each rank.
    """
    first = differences[0]
    if first.quantity == "loss" and not first.step:
        wrong, compared = first_wrong_output(expected, found)
        if wrong is not None:
            return wrong or "the model", message(
                "outputs_wrong_from_module", module=wrong or message("the_whole_model")
            )
        if compared:
            return "loss", message("outputs_right_but_loss", modules=compared)
    alike = [difference for difference in differences if difference.quantity == first.quantity]
    wrong_tensors: Iterable[str] = ()
    if first.quantity in OF_TENSORS:
        wrong_tensors = dict.fromkeys(difference.tensor.partition(PART)[0] for difference in alike if difference.tensor)
    elif first.quantity in OF_RANKS:
        ranks = {
            difference.rank for difference in alike if difference.rank is not None and difference.step == first.step
        }
        wrong_tensors = [name for name in observed.divided if _holders(observed, name) <= ranks]
    if not wrong_tensors or {*trained} <= {*wrong_tensors}:
        return "", None
    order = {module: place for place, module in enumerate(expected or map(_module, trained))}
    last = max(map(_module, wrong_tensors), key=lambda module: order.get(module, -1))
    if first.quantity in OF_RANKS:
        return last, message("ranks_wrong_from_module", module=last, tensors=[*wrong_tensors])
    return last, message("tensors_wrong_from_module", module=last, tensors=[*wrong_tensors])


def _holders(observed: Trace, tensor: str) -> set[int]:
    """Returns the ranks that have a part of a divided tensor, or all of it."""
    assert observed.mesh
    held, ranks = observed.divided[tensor], range(observed.mesh.size)
    return {rank for rank in ranks if all(observed.mesh.coordinates(rank)[axis] in held[axis] for axis in held)}


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def first_wrong_output(expected: Outputs, found: Sequence[Outputs]) -> tuple[str | None, int]:
    """Returns the first module whose output differs, None for none, and how many were compared. '' is the model itself.

    A module is not compared where the ranks do not have a whole number of copies of its output, as where they compute a
    part of it twice.
    """
    compared = 0
    for module, values in expected.items():
        if module.startswith(ZEROS):
            continue
        of_ranks = np.concatenate([np.zeros(0), *(rank[module] for rank in found if module in rank)])
        copies, left = divmod(len(of_ranks), len(values) or 1)
        if left or not copies:  # with outputs that are all zeros, which may be the mistake
            zeros = sum(int(rank[name][0]) for rank in found if (name := f"{ZEROS}{module}") in rank)
            if not 0 <= zeros <= MOST_COPIES * len(found) * len(values):  # a record may claim any number
                continue
            of_ranks = np.concatenate([of_ranks, np.zeros(zeros)])
            copies, left = divmod(len(of_ranks), len(values) or 1)
        if left or not copies:
            continue
        compared += 1
        gap = np.abs(np.sort(of_ranks) - np.repeat(values, copies))
        if not gap.max(initial=0.0) <= FIRST_FORWARD_APART * np.abs(values).max(
            initial=0.0
        ):  # 'not <=': NaN differs, too
            return module.partition(LATER_CALL)[0], compared
    return None, compared
