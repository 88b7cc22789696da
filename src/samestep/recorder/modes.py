"""Records whether layers that compute otherwise in evaluation mode, such as dropout, were trained in training mode."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from samestep.job.foreign import ById, attribute_of, is_a, named_parts_in, parameters_in
from samestep.recorder.parameters import plain


class Modes:
    """The modes of the layers of all models that are trained."""

    def __init__(self) -> None:
        self._known = ById[None]()  # outermost modules
        # Name of a layer -> (the layer, the names of the parameters that are trained with it).
        self._layers: dict[str, tuple[Any, frozenset[str]]] = {}

    def add(self, module: nn.Module, names: Mapping[int, str]) -> None:
        """Adds the layers of an outermost module. names: id of each trained parameter -> its name."""
        if module in self._known:
            return
        self._known.put(module, None)
        trained = frozenset(names[id(parameter)] for parameter in parameters_in(module) if id(parameter) in names)
        layers = {id(layer) for layer, _ in self._layers.values()}
        for name, part in named_parts_in(module):
            if not _has_modes(part) or id(part) in layers:
                continue
            name = plain(name)
            if name in self._layers:  # a layer of another model
                name = f"{type(module).__name__} {len(self._layers)}: {name}"
            self._layers[name] = part, trained

    def at_backward(self, reached: Collection[str]) -> dict[str, bool]:
        """Returns layer -> whether it is in training mode, of the models with these parameters."""
        return {
            name: bool(attribute_of(layer, "training"))
            for name, (layer, trained) in self._layers.items()
            if not trained.isdisjoint(reached)
        }

    def of_optimizer(self, modes: Mapping[str, bool], held: Collection[str]) -> dict[str, bool]:
        """Returns those of these modes that are of models with parameters which the optimizer holds."""
        return {name: mode for name, mode in modes.items() if not self._layers[name][1].isdisjoint(held)}

    def release(self) -> None:
        self._layers = {}


def _has_modes(part: Any) -> bool:
    """Returns whether a part of a module computes otherwise in evaluation mode."""
    if is_a(part, _DropoutNd):
        return bool(attribute_of(part, "p"))
    if is_a(part, nn.RNNBase) or is_a(part, nn.MultiheadAttention):
        return bool(attribute_of(part, "dropout"))
    return is_a(part, _NormBase) and bool(attribute_of(part, "track_running_stats"))
