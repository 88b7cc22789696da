"""Tensors that no optimizer moves: frozen networks, moving averages of the weights, buffers and queues.

A script updates them by itself, and nothing else keeps them the same on all ranks. A digest is taken of those whose
storage, version or sampled elements have changed: `parameter.data.mul_()` leaves the version as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from samestep.job.foreign import ById, attribute_of, attributes_of, is_a, named_parts_in, parameters_in, parts_in
from samestep.rank.hooks import Hooks
from samestep.rank.shards import block_of, is_shard
from samestep.recorder import sharding
from samestep.recorder.parameters import plain, sample_of
from samestep.recorder.window import compress
from samestep.records.script import STATISTICS, UntrainedKind, UntrainedRecord

IsTrained = Callable[[Tensor], bool]


def patch_copies(hooks: Hooks, copied: ById[None]) -> None:
    """Adds each module that is copied, as by copy.deepcopy, to a set."""

    def new_set_state(set_state: Any, self: nn.Module, state: Any) -> None:
        set_state(self, state)
        copied.put(self, None)

    hooks.attach(nn.Module, "__setstate__", new_set_state)


@dataclass
class _Held:
    """One tensor, which is looked up by its name each time: `self.center = …` replaces it."""

    owner: nn.Module
    attribute: str
    place: tuple[int, int] = (0, -1)  # of its storage, and its version
    sample: Tensor | None = None
    digest: int = 0

    def now(self) -> Tensor | None:
        value = attribute_of(self.owner, self.attribute)
        return value if is_a(value, Tensor) and value.device.type != "meta" else None

    def look(self) -> tuple[Tensor, bool, bool] | None:
        """Returns (the tensor, whether it may have changed since the last look, whether in a part alone)."""
        now = self.now()
        if now is None:
            return None
        tensor = block_of(now)  # FSDP2 puts a shard in the place of a whole tensor after a first forward
        # A tensor of block_of() counts its own versions: this version also changes where values are written again.
        held: Any = now
        version: int = (held._local_tensor if is_shard(now) else held)._version
        place, sample = (tensor.data_ptr(), version), sample_of(tensor)
        before, self.sample = self.sample, sample
        moved, self.place = place != self.place, place
        if before is None or before.shape != sample.shape:
            return tensor, True, False
        changed = sample != before
        some = bool(changed.any())
        return tensor, moved or some, some and not bool(changed.all())


class Untrained:
    """The tensors that this rank holds beside the trained weights, and their changes from one step to the next.

    is_trained: whether a parameter is one of those that are trained. copies: the modules that have been copied, which
    may be averages that no forward uses.
    """

    def __init__(self, is_trained: IsTrained) -> None:
        self._is_trained = is_trained
        self._records: dict[str, UntrainedRecord] = {}
        self.copies = ById[None]()
        self._held: dict[str, _Held] = {}
        self._names: dict[tuple[int, str], str] = {}  # (id of the owner, attribute) -> name
        self._modules: dict[int, nn.Module] = {}
        self._prefixes = Counter[str]()
        self._first: dict[str, _Held] = {}  # network -> a weight that stands for it between the steps
        self._begin: dict[str, tuple[int, Tensor]] = {}  # network -> the digest of that weight at first, and a sample
        self._updates, self._early = Counter[str](), set[str]()

    def add(self, module: nn.Module, is_copy: bool = False) -> None:
        """Takes up an outermost module. is_copy: one that was not called."""
        if id(module) in self._modules or _is_flattened(module):
            return
        self._modules[id(module)] = module
        has_trained = any(map(self._is_trained, parameters_in(module)))
        prefix = "" if has_trained else f"{type(module).__name__}: "
        self._prefixes[prefix] += 1
        if not has_trained and self._prefixes[prefix] > 1:
            prefix = f"{type(module).__name__} {self._prefixes[prefix]}: "
        for name, owner, attribute, kind in self._tensors(module):
            if (id(owner), attribute) in self._names:
                continue
            held, full_name = _Held(owner, attribute), f"{prefix}{name}"
            if full_name in self._records or (looked := held.look()) is None:
                continue
            held.digest = sharding.digests_of({"": looked[0]})[""]
            network = f"{prefix}{name.partition('.')[0]}" if has_trained else prefix.removesuffix(": ")
            self._names[id(owner), attribute], self._held[full_name] = full_name, held
            self._records[full_name] = UntrainedRecord(kind, network, held.digest, called=not is_copy)
            if kind == "frozen" and looked[0].is_floating_point() and network not in self._first:
                self._first[network] = first = _Held(owner, attribute)
                first.look()
                if first.sample is not None:
                    self._begin[network] = held.digest, first.sample

    def call(self, module: nn.Module) -> None:
        """Notes a forward pass of a module that is not trained by it."""
        for owner in parts_in(module) if id(module) in self._modules else ():
            for attribute in (*attributes_of(owner)["_parameters"], *attributes_of(owner)["_buffers"]):
                if name := self._names.get((id(owner), attribute)):
                    self._records[name] = replace(self._records[name], called=True)

    def add_copies(self, trained: Mapping[str, Tensor]) -> None:
        """Takes up the copies of the trained model that no forward has used: averages that are kept for later."""
        shapes = {tensor.shape for tensor in trained.values()}
        inner = {id(part) for module in self.copies for part in parts_in(module) if part is not module}
        for module in sorted(self.copies, key=lambda module: type(module).__name__):
            weights = [*parameters_in(module)]
            if id(module) in inner or not weights or any(map(self._is_trained, weights)):
                continue
            if all(weight.shape in shapes for weight in weights):
                self.add(module, is_copy=True)

    def note_updates(self, early: bool = False) -> None:
        """Notes which networks have changed since the last call. early: between the backward pass and the step."""
        for network, held in self._first.items():
            looked = held.look()
            if looked and looked[1]:
                self._updates[network] += 1
                if early:
                    self._early.add(network)

    def after_step(self) -> tuple[dict[str, int], dict[str, int], list[str]]:
        """Returns (the digests that have changed since the step before, how often each network has, and those that
        have changed early)."""
        looked = {name: held.look() for name, held in self._held.items()}
        changed = {name: look[0] for name, look in looked.items() if look and look[1]}
        digests = sharding.digests_of(changed)
        new = {name: digest for name, digest in digests.items() if digest != self._held[name].digest}
        for name, digest in new.items():
            self._held[name].digest = digest
            look = looked[name]
            if look and look[2]:
                self._records[name] = replace(self._records[name], in_part=True)
        updates, early = dict(self._updates), sorted(self._early)
        self._updates.clear()
        self._early.clear()
        return new, updates, early

    def sums(self, names: Iterable[str] | None) -> dict[str, Tensor]:
        """Returns the compressed sums of what is held in floating point; names: of which alone; None: of all."""
        held = {name: self._held[name].now() for name in (self._held if names is None else names)}
        return {n: compress(tensor) for n, tensor in held.items() if tensor is not None and tensor.is_floating_point()}

    def follows(self, trained: Mapping[str, Tensor], start: Mapping[str, int]) -> dict[str, float]:
        """Returns how far each network that began as a copy of trained weights has moved, as a share of how far these
        have. start: the digests of the first trained weights."""
        names, shares = {start[name]: name for name in trained if name in start}, {}
        for network, (digest, begin) in self._begin.items():
            now, name = self._first[network].now(), names.get(digest)
            if now is None or name is None or trained[name].shape != now.shape:
                continue
            end = sample_of(trained[name])
            way = float((end - begin).double().abs().sum())
            if way:
                shares[network] = float((sample_of(now) - begin).double().abs().sum()) / way
        return shares

    def records(self) -> dict[str, UntrainedRecord]:
        """Returns what is held, without parameters that are trained by now."""
        trained = {
            name for name, held in self._held.items() if (now := held.now()) is not None and self._is_trained(now)
        }
        return {name: record for name, record in self._records.items() if name not in trained}

    def forget(self) -> None:
        """Takes the present tensors for those of the start."""
        self.after_step()
        for name, held in self._held.items():
            self._records[name] = replace(self._records[name], start=held.digest, in_part=False)

    def release(self) -> None:
        """Lets go of the models."""
        for held in (self._held, self._first, self._begin, self._names, self._modules, self.copies):
            held.clear()

    def _tensors(self, module: nn.Module) -> Iterator[tuple[str, nn.Module, str, UntrainedKind]]:
        """Yields (name, its module, attribute, kind) of the whole tensors of a module that are not trained."""
        for path, owner in named_parts_in(module):
            words = [word for word in plain(path).split(".") if word]
            for attribute, parameter in attributes_of(owner)["_parameters"].items():
                if parameter is not None and not self._is_trained(parameter) and not _is_apart(parameter):
                    yield ".".join([*words, attribute]), owner, attribute, "frozen"
            for attribute, buffer in attributes_of(owner)["_buffers"].items():
                persistent = (
                    attribute not in attributes_of(owner)["_non_persistent_buffers_set"] and attribute not in STATISTICS
                )
                if buffer is not None and persistent and not _is_apart(buffer):
                    yield ".".join([*words, attribute]), owner, attribute, "buffer"


def _is_apart(tensor: Tensor) -> bool:
    """Returns whether a rank holds a part of a tensor, or nothing yet."""
    return is_lazy(tensor) or is_shard(tensor) or sharding.is_partitioned(tensor) or tensor.layout != torch.strided


def _is_flattened(module: nn.Module) -> bool:
    return any(type(part).__name__ == "FullyShardedDataParallel" for part in parts_in(module))
