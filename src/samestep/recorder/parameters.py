"""The parameters of the models that a script trains: their names, what this rank holds of each, and their gradients."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from itertools import product
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from samestep.job.foreign import attribute_of, defines, named_buffers_in, named_parameters_in, parts_in
from samestep.rank.shards import block_of, is_shard
from samestep.recorder import sharding
from samestep.recorder.guards import recorder_guard
from samestep.recorder.pieces import Pieces
from samestep.recorder.sharding import Flattened, OnGradient
from samestep.recorder.window import dtype_name
from samestep.records.script import COMPRESSED, LOCAL_PIECE, TAKEN

WRAPPERS = ("module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
PIPELINES = "torch.distributed.pipelining.stage"
ROUND_TO = {"fp16_compress": "float16", "bf16_compress": "bfloat16"}
SAMPLED = 1024  # elements of a tensor that are looked at to see whether it has changed
Cut = Callable[[str, Tensor], dict[str, Tensor]]  # of a parameter and its gradient, those of the ranks that hold it
LOSSY = ("powerSGD", "quantization", "post_localSGD")  # of torch's own: a mean only at first, or never


def plain(name: str) -> str:
    """Returns a parameter's name without the names of wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def stage_prefix() -> str:
    """Returns the words before the names of a pipeline's stage, of which the present forward is; '' of none.

    Two stages may have parameters of the same names, which are no replicas of each other.
    """
    frame: FrameType | None = sys._getframe() if PIPELINES in sys.modules else None
    while frame:
        stage: Any = frame.f_locals.get("self")
        if type(stage).__module__ == PIPELINES and defines(stage, "stage_index"):
            return f"stage {stage.stage_index}: "
        frame = frame.f_back
    return ""


def precisions(modules: Iterable[Any], parameters: Iterable[Tensor]) -> set[str]:
    """Returns the parameters' dtypes, and those to which communication hooks of DDP round gradients; COMPRESSED where
    they lose more."""
    dtypes = {dtype_name(parameter) for parameter in parameters}
    for module in modules:
        for hook, _ in attribute_of(module, "_comm_hooks", ()):
            name = attribute_of(hook, "__name__", "")
            dtypes |= {dtype for start, dtype in ROUND_TO.items() if name.startswith(start)}
            dtypes |= {COMPRESSED for word in LOSSY if word in name}
    return dtypes


class Moves:
    """Whether the steps move a 16-bit weight's elements, of which a sample is looked at: a step below half of an
    element's last bit leaves it as it was."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._start = sample_of(parameter)
        self._moved = torch.zeros_like(self._start, dtype=torch.bool)
        self._has_gradient = torch.zeros_like(self._moved)

    def after_step(self) -> None:
        self._moved |= sample_of(self._parameter) != self._start
        if self._parameter.grad is not None:
            self._has_gradient |= sample_of(self._parameter.grad) != 0

    @property
    def with_gradient(self) -> int:
        return int(self._has_gradient.sum())

    @property
    def still(self) -> int:
        return int((self._has_gradient & ~self._moved).sum())


def sample_of(tensor: Tensor) -> Tensor:
    """Returns some elements of a tensor, by which is seen whether it changes."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLED)].clone()


class TakenGradients:
    """The gradients that a step has taken and that were not cleared afterwards. left: the names of their parameters, at
    the latest backward pass, which has added to them.

    A gradient that is written to in between, as by zero_() or a decay, is another one.
    """

    def __init__(self) -> None:
        self.left: set[str] = set()
        self._versions: dict[str, int] = {}

    def begin_backward(self, parameters: Mapping[str, nn.Parameter]) -> None:
        gradients = {name: parameters[name].grad for name in self._versions if name in parameters}
        self.left = {
            name
            for name, gradient in gradients.items()
            if gradient is not None and gradient._version == self._versions[name] and _is_not_zero(gradient)
        }

    def end_backward(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._versions = {
            name: gradient._version for name in self.left if (gradient := parameters[name].grad) is not None
        }

    def end_step(self, held: Iterable[str], parameters: Mapping[str, nn.Parameter]) -> list[str]:
        """Returns the names of an optimizer's parameters whose gradient was that of its step before, and more."""
        names = {*held}
        uncleared, self.left = sorted(self.left & names), self.left - names
        taken = {name: parameters[name].grad for name in names}
        self._versions |= {name: gradient._version for name, gradient in taken.items() if gradient is not None}
        return uncleared

    def forget(self) -> None:
        self.left, self._versions = set(), {}


def _is_not_zero(gradient: Tensor) -> bool:
    return gradient.layout != torch.strided or bool(block_of(gradient).any())


class Parameters:
    """The parameters that are trained, and the weights that are not.

    by_name: the trained ones. start: digests of the first weights. shards: names of those each element of which is on
    one rank. splits: whether they are of a tensor-parallel model. cut: cuts gradients into what ranks hold of them.
    on_gradient: called with each gradient that this rank computes.
    """

    def __init__(self, world_size: int, on_gradient: OnGradient) -> None:
        self.by_name: dict[str, nn.Parameter] = {}
        self.start: dict[str, int] = {}
        self.shards: list[str] = []
        self.splits = False
        self.shapes: dict[str, list[int]] = {}
        self.uniform: list[str] = []
        self.cut: Cut | None = None
        self.flattened = Flattened(world_size)
        self._world_size, self._on_gradient = world_size, on_gradient
        self._names: dict[int, str] = {}  # id of a parameter -> its name
        self._modules: list[Any] = []  # outermost modules that have been trained
        self._frozen: dict[int, nn.Module] = {}  # outermost modules without trainable parameters, by their ids
        self._moves: dict[str, Moves] = {}
        self._taken_gradients = TakenGradients()
        self.ties: list[tuple[str, str]] = []
        self._digests: dict[str, int] = {}  # digests of this rank's parameters before the next step
        self._hooks: list[Any] = []
        # Tensors that stand for shards during a forward pass, and for some time after it.
        self._unsharded: dict[int, Tensor] = {}
        self._has_unseen_shards = False  # whether there are shards that were never seen unsharded
        self.pieces, self._data = Pieces(), dict[int, int]()  # id of FSDP2's parameters -> dimensions of its mesh

    @property
    def are_known(self) -> bool:
        """Whether a model has been seen."""
        return bool(self.by_name) or self._has_unseen_shards

    @property
    def names(self) -> Mapping[int, str]:
        """Id of each trained parameter -> its name."""
        return self._names

    def of_last_ddp(self) -> list[str]:
        """Returns the names of the trained parameters of DistributedDataParallel's last module, in its order."""
        wrappers = [module for module in self._modules if type(module).__name__ == "DistributedDataParallel"]
        named = named_parameters_in(wrappers[-1].module) if wrappers else ()
        return [name for name, parameter in named if parameter.requires_grad]

    def is_trained(self, parameter: Tensor) -> bool:
        """Returns whether a parameter is one of those that are trained, or stands for one in a forward pass."""
        return id(parameter) in self._names or id(parameter) in self._unsharded

    def add(self, module: nn.Module) -> None:
        """Names the parameters of an outermost module, and watches their gradients."""
        passing = sharding.unsharded(module)
        trained = {number for number, tensor in passing.items() if tensor.requires_grad}
        self._has_unseen_shards = self._has_unseen_shards or bool(trained - {*self._unsharded})
        new = [(plain(name), p) for name, p in named_parameters_in(module) if p.requires_grad]
        new = [(name, p) for name, p in new if id(p) not in self._names and id(p) not in passing]
        if not new:
            return
        self._modules.append(module)
        self.splits = self.splits or sharding.splits_model(module)
        self._data |= sharding.data_dimensions(module)
        prefix = stage_prefix()
        still = [(n, p) for n, p in named_parameters_in(module) if not p.requires_grad and id(p) not in passing]
        frozen = {f"{prefix}{plain(name)} (frozen)": p for name, p in still if self._has_copies(p)}
        self._note_pieces(frozen)
        self._add_to_start(sharding.digests_of({n: p for n, p in frozen.items() if n not in self.start}))
        names: dict[int, str] = {}
        for name, parameter in new:
            name = f"{prefix}{name}"
            if name in self.by_name:  # a parameter of another model
                name = f"{type(module).__name__} {len(self._modules)}: {name}"
            names[id(parameter)], self.by_name[name] = name, parameter
            self.shapes[name] = [*parameter.shape]
            block = block_of(parameter)
            if block.numel() and bool((block == block.flatten()[0]).all()):
                self.uniform.append(name)
        self._names |= names
        self._watch_gradients(module, names)
        self._digests = sharding.digests_of(self.by_name)
        self._moves |= {name: Moves(self.by_name[name]) for name in names.values() if self._rounds(self.by_name[name])}
        self.ties += self._ties(module)
        self._add_to_start(self._of_whole_parameters(self._digests))

    def _has_copies(self, parameter: Tensor) -> bool:
        """Returns whether other ranks may hold the same elements. Of what is sharded over all, each rank holds other
        ones."""
        is_piece = is_shard(parameter) and not sharding.is_whole_in_world(parameter, self._world_size)
        return is_piece or not sharding.is_sharded(parameter)

    def add_frozen(self, module: nn.Module) -> None:
        """Takes the digests of an outermost module without trainable parameters."""
        if id(module) not in self._frozen:
            self._frozen[id(module)] = module
            held = {**dict(named_parameters_in(module)), **dict(named_buffers_in(module))}
            unsharded = {n: t for n, t in held.items() if not is_lazy(t) and not sharding.is_sharded(t)}
            passing = sharding.unsharded(module)
            named = {f"{type(module).__name__} (frozen): {n}": t for n, t in unsharded.items() if id(t) not in passing}
            self._add_to_start(sharding.digests_of({n: t for n, t in named.items() if n not in self.start}))

    def _rounds(self, parameter: nn.Parameter) -> bool:
        """Returns whether a parameter has 16 bits, and the rank holds it whole."""
        is_unsharded = not sharding.is_sharded(parameter) and id(parameter) not in self.flattened.parts
        return is_unsharded and parameter.dtype in (torch.bfloat16, torch.float16)

    def _ties(self, module: nn.Module) -> list[tuple[str, str]]:
        """Returns (embedding, output layer) pairs of parameters that begin with the same values."""
        weights: dict[type, list[str]] = {nn.Embedding: [], nn.Linear: []}
        for part in parts_in(module):
            if type(part) in weights and id(part.weight) in self._names:
                weights[type(part)].append(self._names[id(part.weight)])
        ties = []
        for embedding, head in product(weights[nn.Embedding], weights[nn.Linear]):
            if embedding == head or self._digests[embedding] != self._digests[head]:
                continue
            if self.by_name[embedding].numel() > 1 and bool((self.by_name[embedding] != 0).any()):
                ties.append((embedding, head))
        return ties

    def _watch_gradients(self, module: nn.Module, names: Mapping[int, str]) -> None:
        """Calls on_gradient with this rank's own gradients of new parameters, also of sharded ones."""
        self.flattened.add(module, names, self._on_gradient)
        new = {name: self.by_name[name] for name in names.values()}
        for name, parameter in new.items():
            if not is_shard(parameter) and id(parameter) not in self.flattened.parts:
                self._hooks.append(
                    parameter.register_hook(recorder_guard.hook(functools.partial(self._on_gradient, name)))
                )
        sharded = {id(parameter): name for name, parameter in new.items() if is_shard(parameter)}
        whole_names = [n for n in sharded.values() if sharding.is_whole_in_world(new[n], self._world_size)]
        if not self.splits and len(whole_names) == len(sharded):
            self.shards += whole_names
        else:
            self._note_pieces(new)
        self.shards += self.flattened.shards(names)
        by_fsdp = {number: name for number, name in sharded.items() if number in self._data or not self.pieces.by_name}
        sharding.hook_unsharded(module, by_fsdp, self._unsharded, self._on_piece)
        for number in sharded.keys() - by_fsdp.keys():
            hook = recorder_guard.hook(functools.partial(self._on_piece, sharded[number]))
            self._hooks.append(self.by_name[sharded[number]].register_hook(hook))

    def _note_pieces(self, named: Mapping[str, Tensor]) -> None:
        """Notes the pieces of a model that is divided otherwise than by FSDP2 over all ranks."""
        for name, parameter in named.items():
            if is_shard(parameter):
                self.pieces.note(name, parameter, self._data.get(id(parameter), 0))

    def _on_piece(self, name: str, gradient: Tensor) -> None:
        """Hands on this rank's own gradient of a sharded parameter: its piece of it, among zeros."""
        if is_shard(gradient):
            self.pieces.note(LOCAL_PIECE.format(name), gradient)
        self._on_gradient(name, sharding.among_zeros(gradient))

    def _add_to_start(self, digests: Mapping[str, int]) -> None:
        self.start |= {name: digest for name, digest in digests.items() if name not in self.start}

    def gradients(self, computed: Container[str]) -> dict[str, Tensor]:
        """Returns the gradients that lie in .grad now, compressed. computed: names of those that this rank computes."""
        flat = self.flattened.gradients(self.by_name, computed)
        plain_gradients = {n: p.grad for n, p in self.by_name.items() if p.grad is not None and n not in flat}
        if self.pieces.by_name:
            for name, gradient in plain_gradients.items():
                if is_shard(gradient):
                    self.pieces.note(TAKEN.format(name), gradient, self._data.get(id(self.by_name[name]), 0))
        if self.cut:
            pieces = {n: p for name, g in plain_gradients.items() for n, p in self.cut(name, g).items()}
            return {name: sharding.sums_of_part(piece) for name, piece in pieces.items()}
        return flat | {name: sharding.sums_of_part(gradient) for name, gradient in plain_gradients.items()}

    def still(self) -> float | None:
        """Returns the share of elements of 16-bit weights that no step has moved, of those with a gradient."""
        with_gradient = sum(moves.with_gradient for moves in self._moves.values())
        return sum(moves.still for moves in self._moves.values()) / with_gradient if with_gradient else None

    def with_gradient(self) -> int:
        """Returns how many parameters have a gradient now."""
        return sum(parameter.grad is not None for parameter in self.by_name.values())

    def held_by(self, optimizer: Optimizer) -> list[str]:
        """Returns the names of those that are in an optimizer's groups."""
        return [name for group in optimizer.param_groups for name in self.of_group(group)]

    def of_group(self, group: Mapping[str, Any]) -> list[str]:
        """Returns the names of those in one group of an optimizer."""
        return [self._names[id(parameter)] for parameter in group["params"] if id(parameter) in self._names]

    def sums(self) -> dict[str, Tensor]:
        """Returns the compressed sums of the weights; of sharded ones this rank's part."""
        unflattened = {n: p for n, p in self.by_name.items() if id(p) not in self.flattened.parts}
        held = {n: p for n, p in unflattened.items() if n in self.shards or not sharding.is_sharded(p)}
        return {n: sharding.sums_of_part(p) for n, p in held.items() if not sharding.is_partitioned(p)}

    def begin_backward(self) -> None:
        self._taken_gradients.begin_backward(self.by_name)

    def end_backward(self) -> None:
        self._taken_gradients.end_backward(self.by_name)

    def uncleared(self, held: Iterable[str]) -> list[str]:
        """Returns the names of those whose gradient of the optimizer's step before is still in that of this step."""
        unflattened = [name for name in held if id(self.by_name[name]) not in self.flattened.parts]
        return self._taken_gradients.end_step(unflattened, self.by_name)

    def changed_since_step(self) -> dict[str, int]:
        """Returns the digests of the whole parameters, if some have changed since the step before; else none."""
        digests = sharding.digests_of(self.by_name)
        return self._of_whole_parameters(digests) if digests != self._digests else {}

    def after_step(self) -> tuple[dict[str, int], list[str]]:
        """Returns (digests of the whole parameters, names of all that have moved since the step before)."""
        digests = sharding.digests_of(self.by_name)
        moved = [name for name, digest in digests.items() if self._digests.get(name) != digest]
        self._digests = digests
        for moves in self._moves.values():
            moves.after_step()
        return self._of_whole_parameters(digests), moved

    def hides_shards(self) -> bool:
        """Returns whether some are sharded in a way that is not judged."""
        return self._has_unseen_shards or self.flattened.hides

    def precisions(self) -> set[str]:
        """Returns the dtypes in which gradients reach the optimizer."""
        return precisions(self._modules, self.by_name.values())

    def buffers(self) -> dict[str, int]:
        """Returns the digests of all modules' buffers."""
        named = {plain(n): b.detach() for module in self._modules for n, b in named_buffers_in(module)}
        return sharding.digests_of({name: buffer for name, buffer in named.items() if not is_shard(buffer)})

    def forget(self) -> None:
        """Forgets the models that have been trained so far. They are no longer watched."""
        for hook in self._hooks:
            hook.remove()
        for held in (
            self._moves,
            self.ties,
            self._hooks,
            self.by_name,
            self.start,
            self.shards,
            self._names,
            self._digests,
        ):
            held.clear()
        self._modules, self._frozen = [], {}
        self.pieces.forget()
        self._taken_gradients.forget()

    def release(self) -> None:
        """Lets go of the models."""
        self._taken_gradients.forget()
        for held in (self._moves, self.by_name, self._modules, self._frozen, self._unsharded):
            held.clear()

    def _of_whole_parameters(self, digests: Mapping[str, int]) -> dict[str, int]:
        flat = {*self.flattened.shards(self._names)}
        names = [
            name
            for name in digests
            if name not in flat and (name in self.pieces.by_name or not sharding.is_sharded(self.by_name[name]))
        ]
        return {name: digests[name] for name in names}
