"""Reads the weight with which each term of a loss enters backward(), from the loss's graph."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from samestep.job.foreign import is_a
from samestep.job.walk import known_leaves
from samestep.rank.digests import digest_rows
from samestep.records.script import LossRecord

# Nodes that hand a scalar's gradient on as it is.
PLAIN = ("Clone", "ToCopy", "Alias", "View", "Squeeze", "Unsqueeze", "ReshapeAlias", "UnsafeView", "Expand")
SINK = "_DDPSink"  # DistributedDataParallel puts it behind the outputs of its module, where it looks for unused ones
UNKNOWN = LossRecord(math.nan, "unknown")
REDUCTIONS = {0: "unknown", 1: "mean", 2: "sum"}  # at::Reduction
MOST = 64  # nodes
JOINS = ("CatBackward", "StackBackward")
# Functions whose results have the bits of their inputs.
MOVES: tuple[str, ...] = (
    "T",
    "Transpose",
    "Permute",
    "Slice",
    "Select",
    "Split",
    "SplitWithSizes",
    "Chunk",
    "Unbind",
    "Cat",
    "Stack",
)
MOVES += ("Index", "AsStrided", "Repeat", "ViewAsReal", "ViewAsComplex", "AccumulateGrad")
WRAPPERS = ("torch.distributed", "torch.nn.parallel", "torch.utils.checkpoint")
DEVIATIONS = ("StdBackward", "VarBackward", "StdMeanBackward", "VarMeanBackward")
WRAPPED = 1 << 64  # added to a negative dimension where autograd saves it
LARGEST = 10_000  # how many nodes of a graph are looked at


def scalar_of(loss: Any) -> Tensor | None:
    """Returns the scalar that backward() is given, alone or as the only one of a list; None where it is another."""
    if is_a(loss, list | tuple) and len(loss) == 1:
        loss = loss[0]
    return loss if is_a(loss, Tensor) and loss.numel() == 1 else None


def terms(loss: Tensor) -> list[LossRecord]:
    """Returns the terms of a scalar loss: the means and sums that it is a linear combination of.

    A term that is neither is 'unknown', and so is what a library's own autograd function returns.
    """
    losses: list[LossRecord] = []
    _walk((loss.grad_fn, loss.output_nr), [], losses, [MOST])
    return losses


def cut_gathers(loss: Tensor, ranks: int) -> int:
    """Returns how often a loss's graph joins as many tensors as there are ranks, of which one has a gradient: what
    was gathered from the ranks, with this rank's own part put in."""
    found = 0
    for node in _nodes(loss.grad_fn):
        if node.name().startswith(JOINS) and len(node.next_functions) == ranks:
            found += sum(input_node is not None for input_node, _ in node.next_functions) == 1
    return found


def functions_of(loss: Tensor) -> set[str]:
    """Returns the functions that a loss's graph is made of, without those that only move values, and those by which
    wrappers of torch.distributed look for backward passes."""
    nodes = (node for node in _nodes(loss.grad_fn) if not type(node).__module__.startswith(WRAPPERS))
    names = {node.name().rpartition("::")[2].rstrip("0123456789").removesuffix("Backward") for node in nodes}
    return names.difference(PLAIN, MOVES)


def targets_of(loss: Tensor) -> list[str]:
    """Returns the digests of a loss's targets, and of the indices that choose among outputs."""
    saved = [getattr(node, name, None) for node in _nodes(loss.grad_fn) for name in ("_saved_target", "_saved_indices")]
    # A part of a tensor that ranks share out is no one rank's choice.
    leaves = [
        leaf for value in saved for leaf in known_leaves(value) if type(leaf) is Tensor and not leaf.requires_grad
    ]
    return [digest_rows([leaf[None]], 1)[0] for leaf in leaves]


def nodes_of(outputs: Any) -> set[Any]:
    """Returns the nodes of a graph that have computed what a module has returned."""
    tensors = [leaf for leaf in known_leaves(outputs) if is_a(leaf, Tensor)]
    return {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}


def normalises_rows(loss: Tensor, outputs: set[Any]) -> bool:
    """Returns whether a loss divides what a model has returned by how far the rows of a batch lie apart: by their
    deviation or variance, or as batch_norm does in training. What the model does itself shows in what it returns.

    outputs: the nodes of what it has returned; where none is known, the whole graph is looked at.
    """
    nodes = (node for node in _nodes(loss.grad_fn, outputs) if node not in outputs and _is_of_rows(node))
    return any(not outputs or not outputs.isdisjoint(_nodes(node, outputs)) for node in nodes)


def _is_of_rows(node: Any) -> bool:
    name = node.name()
    if "BatchNorm" in name:
        return bool(getattr(node, "_saved_training", False))
    if not name.startswith(DEVIATIONS):
        return False
    # Of all elements where no dimension is given; negative ones count from the end, and are saved without their sign.
    dims, rank = getattr(node, "_saved_dim", None) or (0,), node._saved_self.dim()
    return any(dim in (0, -rank, -rank + WRAPPED) for dim in dims)


def _nodes(node: Any, ends: Collection[Any] = ()) -> Iterator[Any]:
    """Yields a node of a graph and those behind it, at most LARGEST; none that is behind an end."""
    visited, nodes = set[Any](), [node]
    while nodes and len(visited) < LARGEST:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        yield node
        if node not in ends:
            nodes += [input_node for input_node, _ in node.next_functions]


def _walk(edge: tuple[Any, int], factors: list[float], losses: list[LossRecord], left: list[int]) -> None:
    """Follows a scalar to its terms. edge: the node that computed it, and which of the node's outputs it is. factors:
    by which it is multiplied on the way."""
    node, output = edge
    left[0] -= 1
    if node is None or left[0] < 0:
        losses.append(UNKNOWN)
        return
    name = node.name().removesuffix("0").removesuffix("Backward")
    edges = node.next_functions
    differentiable = [place for place, (input_node, _) in enumerate(edges) if input_node is not None]
    if name in PLAIN:
        _walk(edges[0], factors, losses, left)
    elif name == SINK and output < len(edges):
        _walk(edges[output], factors, losses, left)
    elif name == "Neg":
        _walk(edges[0], [*factors, -1.0], losses, left)
    elif name in ("Add", "Sub"):
        signs = 1.0, float(node._saved_alpha) * (1 if name == "Add" else -1)
        for place in differentiable:
            _walk(edges[place], [*factors, signs[place]], losses, left)
    elif name in ("Div", "Mul") and (factor := _factor(node, name, differentiable)) is not None:
        _walk(edges[differentiable[0]], [*factors, factor], losses, left)
    else:
        term = _term(node, name, math.prod(factors))
        losses.append(replace(term, factors=[factor for factor in factors if factor != 1.0]))


def _factor(node: Any, name: str, differentiable: list[int]) -> float | None:
    """Returns what a product or quotient multiplies its one differentiable input by; None where that is no number."""
    if len(differentiable) != 1:
        return None
    is_first = differentiable[0] == 0
    operand = node._saved_other if is_first else node._saved_self
    if is_a(operand, Tensor):
        if operand.numel() != 1:
            return None
        operand = operand.item()
    if name == "Div" and (not is_first or not operand):
        return None
    return float(1 / operand if name == "Div" else operand)


def _term(node: Any, name: str, weight: float) -> LossRecord:
    if name == "Mean":
        return LossRecord(weight, "mean", _size(node), name)
    if name == "Sum":
        return LossRecord(weight, "sum", _unmasked(node) or _size(node), name)
    reduction = REDUCTIONS.get(getattr(node, "_saved_reduction", 0), "unknown")
    if reduction == "unknown":
        return UNKNOWN
    total = getattr(node, "_saved_total_weight", None)  # of nll_loss: targets that are not ignored
    scores = getattr(node, "_saved_self", None) if name.startswith("NllLoss") else None
    classes = int(scores.shape[1]) if is_a(scores, Tensor) and scores.dim() > 1 else 0
    # Where classes have weights, the total is no number of targets.
    classes = classes if getattr(node, "_saved_weight", None) is None else 0
    if is_a(total, Tensor) and total.numel() == 1 and float(total):
        return LossRecord(weight, reduction, round(float(total)), name, classes=classes)
    return LossRecord(weight, reduction, _size(node), name, classes=classes)


def _unmasked(node: Any) -> int:
    """Returns how many elements a mask of zeros and ones leaves of what a sum adds up; 0 where there is no mask."""
    product, _ = node.next_functions[0]
    if product is None or product.name() != "MulBackward0":
        return 0
    masks = [getattr(product, name, None) for name in ("_saved_other", "_saved_self")]
    # A product saves the factor that needs no gradient, for the gradient of the other factor alone.
    mask = next((mask for mask in masks if is_a(mask, Tensor) and not mask.requires_grad), None)
    if mask is None or mask.numel() != _size(node) or not bool(((mask == 0) | (mask == 1)).all()):
        return 0
    return int(mask.sum())


def _size(node: Any) -> int:
    """Returns how many elements a reduction's input has; 0 where that is not known."""
    if hasattr(node, "_saved_self_sym_numel"):
        return int(node._saved_self_sym_numel)
    for name in ("_saved_self_sym_sizes", "_saved_self_sizes"):
        if hasattr(node, name):
            return math.prod(int(size) for size in getattr(node, name))
    saved = getattr(node, "_saved_self", None)
    return saved.numel() if is_a(saved, Tensor) else 0
