"""Loss parallelism: each tensor parallel rank computes the logits of its part of the vocabulary, and cross entropy
without gathering them, by torch's loss_parallel().

The output layer is split by its outputs, and an Embedding that shares its weight by the same rows. It is right where
F.cross_entropy alone reads the logits: of a log_softmax that anything else reads torch's gradient is wrong
(https://github.com/pytorch/pytorch/issues/190746). What reads them is noted in one process, before any rank starts.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

from samestep.errors import Refused, UserError
from samestep.job import Job
from samestep.message import Message, message
from samestep.parallel.plan_trial import tried
from samestep.parallel.tensor_plan import ALIKE, GATHERED, ROWS, Plan, TensorTrial, why_not_split

SHAPES = (  # operations after which logits are still logits
    *("__getitem__", "clone", "contiguous", "double", "flatten", "float", "movedim", "permute", "reshape", "to"),
    *("transpose", "unflatten", "view"),
)
LOGITS = {getattr(Tensor, name) for name in SHAPES} | {
    getattr(torch, name) for name in SHAPES if callable(getattr(torch, name, None))
}
READS = ALIKE | {Tensor.shape.__get__, Tensor.size, Tensor.stride, Tensor.numel, Tensor.is_contiguous, Tensor.__len__}  # type: ignore[attr-defined]
cross_entropy = F.cross_entropy  # torch's
SIGNATURE = inspect.signature(cross_entropy)


@dataclass(frozen=True)
class OutputLayer:
    """The layer that computes the logits. tied: the name of an Embedding that shares its weight; '': none."""

    name: str
    tied: str = ""


def output_layer(job: Job, plan: Plan, ranks: int, device: str = "cpu") -> OutputLayer:
    """Returns the layer of the job's model whose outputs the ranks have in parts. plan: how other layers are split.
    Raises Refused where F.cross_entropy alone does not read its output, or the ranks do not divide the vocabulary."""
    try:
        with torch.random.fork_rng():
            trial = tried(job, ROWS, device, partial(TensorTrial, job, device))
            return _checked(trial, plan, ranks)
    except UserError as error:
        raise Refused(message("loss_parallel_does_not_fit", why=error.message)) from error


def _checked(trial: TensorTrial, plan: Plan, ranks: int) -> OutputLayer:
    linear = {name: layer for name, layer in trial.layers.items() if isinstance(layer, nn.Linear)}
    weights = {id(layer.weight): name for name, layer in trial.layers.items() if isinstance(layer, nn.Embedding)}
    readers = _Readers()
    with ExitStack() as hooks:
        for name, layer in linear.items():
            hooks.callback(layer.register_forward_hook(partial(readers.returned, name)).remove)
        for called in trial.layers.values():
            hooks.callback(called.register_forward_pre_hook(readers.begin).remove)
            hooks.callback(called.register_forward_hook(readers.end, always_call=True).remove)
        readers.weights = {id(layer.weight) for layer in linear.values()}
        hooks.enter_context(readers)
        trial.forward()
    if not readers.judged:
        raise Refused(message("loss_is_no_cross_entropy_of_a_layer"))
    name = readers.judged[0]
    layer = linear[name]
    if why := readers.why.get(name) or (message("loss_reads_several_layers") if readers.judged[1:] else None):
        raise Refused(why)
    tied = weights.get(id(layer.weight), "")
    for split in filter(None, (name, tied)):
        why = why_not_split(trial.layers[split]) or trial.unfit.get(split)
        if why and not (tied and why.id == "weight_is_tied" and _owners(trial.model, layer.weight) == 2):
            raise Refused(message("layer_is_not_split_by_the_vocabulary", layer=split, why=why))
    if id(layer.weight) in readers.outside:
        why = message("weight_is_read_outside_of_its_layer")
        raise Refused(message("layer_is_not_split_by_the_vocabulary", layer=name, why=why))
    if plan.get(name, GATHERED) != GATHERED or tied in plan:
        raise Refused(message("output_layer_is_split_otherwise", layer=name))
    if layer.out_features % ranks:
        raise Refused(message("layer_does_not_divide", layer=name, size=layer.out_features, ranks=ranks))
    return OutputLayer(name, tied)


def _owners(model: nn.Module, weight: Tensor) -> int:
    return sum(p is weight for module in model.modules() for p in module._parameters.values())


class _Readers(TorchFunctionMode):
    """Notes what reads the outputs of layers. judged: the layers whose output F.cross_entropy reads. why: layer -> what
    else reads it. weights: the ids of weights. outside: those that an operation takes outside of a layer's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.judged: list[str] = []
        self.why: dict[str, Message] = {}
        self.weights, self.outside = set[int](), set[int]()
        self._logits: dict[int, tuple[str, Tensor]] = {}  # the id of a tensor -> the layer, and the tensor: it stays
        self._running = 0

    def begin(self, layer: nn.Module, inputs: Any) -> None:
        self._running += 1

    def end(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        self._running -= 1

    def returned(self, name: str, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self._logits[id(output)] = name, output

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not self._running and func not in ALIKE:
            self.outside |= {id(tensor) for tensor in taken} & self.weights
        for name in dict.fromkeys(self._logits[id(tensor)][0] for tensor in taken if id(tensor) in self._logits):
            if func in LOGITS:
                self._logits |= {id(leaf): (name, leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
            elif func is cross_entropy:
                self.judged += [name] if name not in self.judged else []
                if flaw := flaw_of(*args, **kwargs):
                    self.why.setdefault(name, flaw)
            elif func not in READS:
                operation = resolve_name(func) or getattr(func, "__name__", str(func))
                self.why.setdefault(name, message("loss_reads_logits_otherwise", layer=name, operation=operation))
        return result


def flaw_of(*arguments: Any, **named: Any) -> Message | None:
    """Returns why torch's loss_parallel() does not take a call of F.cross_entropy; None where it does."""
    given = SIGNATURE.bind(*arguments, **named).arguments
    if given.get("label_smoothing"):
        return message("cross_entropy_of_other_logits", what="label_smoothing")
    if given["target"].is_floating_point():
        return message("cross_entropy_of_other_logits", what="target=…")
    return message("cross_entropy_of_other_logits", what="weight=…") if given.get("weight") is not None else None


_entered, _lock, _stack = [0], Lock(), ExitStack()  # how many threads of this process are in losses_in_parallel()


def _cross_entropy(*arguments: Any, **named: Any) -> Tensor:
    """Computes F.cross_entropy, also of logits that ranks have in parts: then every rank gets the loss as a plain
    tensor."""
    logits = SIGNATURE.bind(*arguments, **named).arguments["input"]
    if not isinstance(logits, DTensor):
        return cross_entropy(*arguments, **named)
    if flaw := flaw_of(*arguments, **named):
        raise Refused(message("loss_parallel_does_not_fit", why=flaw))
    loss: Any = cross_entropy(*arguments, **named)
    return loss.full_tensor()  # type: ignore[no-any-return]


@contextmanager
def losses_in_parallel() -> Iterator[None]:
    """Lets F.cross_entropy take logits that the ranks have in parts while the block runs, and its backward pass. What
    torch changes for it is the process's: of ranks that are threads the first changes it, and the last puts it back."""
    functional: Any = F
    with _lock:
        _entered[0] += 1
        if _entered[0] == 1:
            _stack.enter_context(loss_parallel())
            functional.cross_entropy = _cross_entropy
    try:
        yield
    finally:
        with _lock:
            _entered[0] -= 1
            if not _entered[0]:
                functional.cross_entropy = cross_entropy
                _stack.close()
