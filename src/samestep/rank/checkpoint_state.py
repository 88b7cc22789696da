"""What a checkpoint holds of a training, in one form for all engines: everything by the name of its parameter.

    model         name -> parameter, and what a module's get_extra_state returns
    recipe        the names of the classes of the job's optimizers
    optimizer     name -> key -> value, as momentum_buffer; groups: the numbers of each parameter group
    ema           name -> average
    scheduler, evaluation_scheduler, scaler: their state dicts
    evaluations   the curve, and which is the best
    position      optimizer steps done, and how many of them were skipped
    identity      what is trained: see TrainingIdentity in checkpoints.py
    ranks         replica -> its buffers, and the state that its rows carry

A rank gives what it has: its pieces of sharded tensors, and its stages of a pipeline; of everything else rank 0 alone.
So a checkpoint can be loaded by another engine, and on another number of ranks. Random streams are not in it: they are
keyed by step, micro-batch and replica, and the order of the rows is a pure function of the step.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from samestep.errors import UserError
from samestep.job import Job
from samestep.job.phases import CHECKPOINTED
from samestep.message import message
from samestep.rank.checkpoint_files import Piece, Saved, Stored, foreign, piece_of, piece_of_block
from samestep.rank.checkpoints import Checkpoints
from samestep.rank.parts import Part
from samestep.rank.row_order import pieces_of_block, row_orders
from samestep.rank.shards import block_of, divided_along, is_copied, is_divided, is_shard, place_of, sharded_like
from samestep.rank.step import CarriedState
from samestep.rank.weights import Ema, StateDict
from samestep.records.files import from_json, replace_by
from samestep.world import World
from samestep.world.heartbeat import CHECKPOINT, heartbeat


@dataclass(frozen=True)
class Fragment:
    """A fragment of a parameter that is part of a flat one, which the optimizer has instead.

    name: the parameter's, and numel its size. flat: the flat parameter on this rank. offset: the fragment's first
    element in it. start: its first element in the parameter. length: how many it has.
    """

    name: str
    numel: int
    flat: Tensor
    offset: int
    start: int
    length: int


def fragments_tree(fragments: Sequence[Fragment], state: Mapping[Tensor, Mapping[str, Any]]) -> dict[str, StateDict]:
    """Returns parameter -> key -> this rank's piece of its state, or a number. state: of the flat parameters."""
    return {
        fragment.name: {
            key: Piece(
                value[fragment.offset : fragment.offset + fragment.length].clone(), (fragment.numel,), (fragment.start,)
            )
            if isinstance(value, Tensor) and value.shape == fragment.flat.shape
            else value
            for key, value in state[fragment.flat].items()
        }
        for fragment in fragments
        if fragment.flat in state
    }


def load_fragments(fragments: Sequence[Fragment], state: dict[Tensor, StateDict], saved: Saved) -> None:
    """Gives the flat parameters the state that a checkpoint has of their fragments."""
    for fragment in fragments:
        of_flat = state.get(fragment.flat) or {}
        for key, value in saved.state["optimizer"].get(fragment.name, {}).items():
            if isinstance(value, Stored) and saved.shape(value) and saved.numel(value) == fragment.numel:
                into = of_flat.setdefault(key, torch.zeros_like(fragment.flat.data))
                into[fragment.offset : fragment.offset + fragment.length] = flat_block(
                    saved, value, fragment.start, fragment.length
                ).to(into)
            else:
                of_flat[key] = saved.plain(value)
        if of_flat:
            state[fragment.flat] = of_flat


def flat_block(saved: Saved, stored: Stored, start: int, length: int) -> Tensor:
    """Returns elements of a stored tensor, counted as if it were flat. shape [length]"""
    if len(saved.shape(stored)) == 1:
        return saved.tensor(stored, (start,), (length,))
    return saved.tensor(stored).flatten()[start : start + length]


Tree = StateDict
# The keys that every checkpoint of a training has.
PARTS = {"position": dict, "model": dict, "optimizer": dict, "groups": list, "ranks": dict, "extra": dict}


@dataclass
class TrainingState:
    """The parts of one training on this rank.

    stateful: name -> what has a state dict: the schedulers and the scaler. full_state: returns the full state dict;
    None: the module's own tensors are saved, of shards each rank's. fragments: of the parameters, where the optimizer
    has flat ones instead. recipe: the names of the classes of the job's optimizers; empty: not known.
    """

    world: World
    model: nn.Module
    optimizer: Any
    stateful: Mapping[str, Any]
    carried: CarriedState | None = None
    full_state: Callable[[], Tree] | None = None
    fragments: Sequence[Fragment] = ()
    recipe: Sequence[str] = ()

    def tree(self, ema: Ema | None) -> Tree:
        """Returns what this rank gives to a checkpoint."""
        parameters: Tree = dict(named_parameters(self.model))
        orders = row_orders(self.model)
        if self.full_state:
            full_state = self.full_state()
            parameters = {name: full_state[name] for name in parameters}
        buffers = {name: buffer for name, buffer in self.model.named_buffers() if not buffer.is_meta}
        tree: Tree = {
            "model": {name: piece_of(p, orders.get(name)) for name, p in self._given(parameters).items()},
            "optimizer": self._optimizer_tree(orders),
            "ranks": {},
        }
        if self.world.begins_replica or is_divided(self.model):
            tree["ranks"][str(self.world.replica)] = {"buffers": buffers}
            if self.carried:
                tree["ranks"][str(self.world.replica)]["carried"] = self.carried.state_dict()
        if ema:
            averages = {name: (average, parameter) for name, average, parameter in ema.named(self.model)}
            given = {name: pair for name, pair in averages.items() if self._writes(pair[1])}
            tree["ema"] = {
                name: piece_of_block(a, tuple(p.shape), place_of(p)[1], orders.get(name))
                for name, (a, p) in given.items()
            }
        if self.world.rank == 0:
            tree["groups"] = [plain_numbers(group) for group in self.optimizer.param_groups]
            tree["recipe"] = list(self.recipe)
            tree["flat"] = bool(self.fragments)
            tree["extra"] = {name: module.get_extra_state() for name, module in with_extra_state(self.model)}
            tree |= {name: part.state_dict() for name, part in self.stateful.items()}
        return tree

    def load(self, saved: Saved, *, in_epoch: bool) -> None:
        """Gives the model, the optimizer, the schedulers and the scaler what is in a checkpoint. See also load_ema().

        in_epoch: whether the checkpoint's step is neither the first nor the last of an epoch. Raises UserError for the
        checkpoint of another model or optimizer, or for a carried state of other ranks' rows.
        """
        state = saved.state
        as_many = len(state["ranks"]) == self.world.replicas
        of_replica = state["ranks"][str(self.world.replica) if as_many else "0"]
        self._check(saved, of_replica["buffers"])
        if self.carried and in_epoch and not as_many:
            ranks = {"ranks": len(state["ranks"]), "ranks_here": self.world.replicas}
            raise UserError(message("carried_state_of_other_ranks", checkpoint=saved.folder, **ranks))
        orders = row_orders(self.model)
        for name, parameter in named_parameters(self.model):
            copy_block(saved, state["model"][name], parameter, orders.get(name))
        for name, buffer in self.model.named_buffers():
            copy_block(saved, of_replica["buffers"][name], buffer)
        for name, module in with_extra_state(self.model):
            module.set_extra_state(saved.plain(state["extra"][name]))
        self._load_optimizer(saved)
        for name, part in self.stateful.items():
            # A training of another engine, or in bf16, has no scaler: the scaler begins anew.
            if name != "scaler" or state.get(name):
                part.load_state_dict(saved.plain(state[name]))
        if self.carried and as_many:
            self.carried.load_state_dict(saved.plain(of_replica["carried"]), self.world.device)

    def load_fragments(self, saved: Saved | None, fragments: Sequence[Fragment]) -> None:
        """Registers the fragments of an optimizer's flat parameters, and gives them what is in a checkpoint."""
        self.fragments = fragments
        if saved is not None:
            load_fragments(fragments, self.optimizer.state, saved)

    def load_ema(self, saved: Saved, ema: Ema) -> None:
        """Loads the averages of the weights from a checkpoint."""
        if "ema" not in saved.state:
            raise UserError(message("checkpoint_lacks", checkpoint=saved.folder, what="ema"))
        orders = row_orders(self.model)
        for name, average, parameter in ema.named(self.model):
            if not parameter.is_meta:
                average.copy_(stored_block(saved, saved.state["ema"][name], parameter, orders.get(name)))

    def _writes(self, tensor: Any, parameter: Any = None) -> bool:
        """Returns whether this rank writes a tensor: its block of a sharded one; of others, the first rank that has it.

        parameter: whose state it is; None: it is one itself.
        """
        divided = divided_along(tensor if parameter is None else parameter)
        if is_copied(tensor if parameter is None else parameter):
            return False
        if not is_shard(tensor):
            is_here = not (isinstance(tensor, Tensor) and tensor.is_meta)
            return is_here and self.world.begins_copies(divided)
        if divided:  # the ranks of another stage have parameters of their own, which they shard
            if not self.world.begins_copies({*divided, *tensor.device_mesh.mesh_dim_names}):
                return False
        elif 0 not in tensor.device_mesh.mesh:  # of another replica, whose tensors are sharded among its own ranks
            return False
        coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
        return not any(
            placement.is_replicate() and position for placement, position in zip(tensor.placements, coordinate)
        )

    def _given(self, tree: Tree, parameter: Any = None) -> Tree:
        return {name: value for name, value in tree.items() if self._writes(value, parameter)}

    def _optimizer_tree(self, orders: Mapping[str, Tensor]) -> Tree:
        if self.full_state:
            return fragments_tree(self.fragments, self.optimizer.state)
        inner, names = self._inner(), self._names()
        states = [(parameter, state) for parameter, state in inner.state.items() if not parameter.is_meta]
        if inner is self.optimizer:  # otherwise ZeRO: this rank's parameters
            states = [(parameter, given) for parameter, state in states if (given := self._given(state, parameter))]

        def in_pieces(parameter: Tensor, value: Any) -> Any:
            order = orders.get(names[id(parameter)])
            of_rows = order is not None and isinstance(value, Tensor) and value.shape == parameter.shape
            return piece_of(value, order) if of_rows else value

        return {names[id(p)]: {key: in_pieces(p, value) for key, value in state.items()} for p, state in states}

    def _inner(self) -> Any:
        """Returns the optimizer that has the state: ZeroRedundancyOptimizer has another one inside."""
        inner = getattr(self.optimizer, "optim", None)
        return inner if isinstance(inner, Optimizer) else self.optimizer

    def _names(self) -> dict[int, str]:
        names = {id(parameter): name for name, parameter in named_parameters(self.model)}
        for group in self.optimizer.param_groups:
            if any(id(parameter) not in names for parameter in group["params"]):
                raise UserError(message("optimizer_trains_a_parameter_of_no_model"))
        return names

    def _load_optimizer(self, saved: Saved) -> None:
        for group, numbers in zip(self.optimizer.param_groups, saved.state["groups"], strict=True):
            load_numbers(group, saved.plain(numbers))
        if self.full_state:
            return  # load_fragments() does it, when there are flat parameters
        inner, names, orders = self._inner(), self._names(), row_orders(self.model)
        from_flat = saved.state.get("flat", False)
        for group in inner.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                state = saved.state["optimizer"].get(name)
                if state is not None and not parameter.is_meta:
                    saved_dtype = None if from_flat else saved.dtype(saved.state["model"][name])
                    inner.state[parameter] = {
                        key: load_state(
                            saved,
                            value,
                            key,
                            group=group,
                            parameter=parameter,
                            saved_dtype=saved_dtype,
                            order=orders.get(name),
                        )
                        for key, value in state.items()
                    }

    def _check(self, saved: Saved, buffers: Tree) -> None:
        saved_tensors = {**saved.state["model"], **buffers}
        tensors = dict([*named_parameters(self.model), *self.model.named_buffers()])
        shapes = {name: list(saved.shape(stored)) for name, stored in saved_tensors.items()}
        differ = [
            name
            for name in {**tensors, **saved_tensors}
            if shapes.get(name) != (list(tensors[name].shape) if name in tensors else None)
        ]
        if differ:
            raise UserError(message("checkpoint_of_another_model", checkpoint=saved.folder, tensors=sorted(differ)))
        there_recipe = saved.state.get("recipe")
        if there_recipe and self.recipe and there_recipe != list(self.recipe):
            raise UserError(
                message(
                    "checkpoint_of_another_optimizer",
                    checkpoint=saved.folder,
                    saved=there_recipe,
                    optimizers=self.recipe,
                )
            )
        for name in self.stateful:
            if name != "scaler" and name not in saved.state:
                raise UserError(message("checkpoint_lacks", checkpoint=saved.folder, what=name))
        if len(saved.state["groups"]) != len(self.optimizer.param_groups):
            groups = {"saved": len(saved.state["groups"]), "groups": len(self.optimizer.param_groups)}
            raise UserError(message("checkpoint_with_other_parameter_groups", checkpoint=saved.folder, **groups))


def check_parts(saved: Saved) -> None:
    """Raises UserError for a checkpoint that lacks a part of a training's state, or has one of another type."""
    state = saved.state if isinstance(saved.state, dict) else {}
    for name, kind in PARTS.items():
        if not isinstance(state.get(name), kind):
            raise UserError(foreign(saved.folder, message("state_lacks", what=name)))
    count = len(state["ranks"]) or 1
    replicas = [state["ranks"].get(str(replica)) for replica in range(count)]
    buffers = [replica.get("buffers") if isinstance(replica, dict) else None for replica in replicas]
    if saved.manifest.world_size % count:
        raise UserError(foreign(saved.folder, message("state_of_another_type")))
    if not all(isinstance(value, dict) for value in [*state["groups"], *state["optimizer"].values(), *buffers]):
        raise UserError(foreign(saved.folder, message("state_of_another_type")))


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters by the names that they have without activation checkpointing; tied ones once."""
    for name, parameter in model.named_parameters():
        yield name.replace(CHECKPOINTED, ""), parameter


def with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules that keep a state besides parameters and buffers."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module


def plain_numbers(group: Tree) -> Tree:
    """Returns the numbers of a parameter group: its rate, its momentum, … Switches, as foreach, are the engine's."""
    return {name: value for name, value in group.items() if name != "params" and _is_number(value)}


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_number(inner) for inner in value)
    return isinstance(value, int | float | Tensor) and not isinstance(value, bool)


def load_numbers(group: Tree, numbers: Tree) -> None:
    """Gives a parameter group the numbers of a checkpoint; a tensor stays the same object, which torch may hold."""
    for name, value in numbers.items():
        if isinstance(group.get(name), Tensor):
            group[name].copy_(value)
        else:
            group[name] = value


def copy_block(saved: Saved, stored: Stored, tensor: Tensor, order: Tensor | None = None) -> None:
    """Copies this rank's block of a stored tensor into `tensor`; nothing into one that another rank has. order: of its
    rows, as row_orders() says."""
    if tensor.is_meta:
        return
    with torch.no_grad():
        block_of(tensor).copy_(stored_block(saved, stored, tensor, order))


def stored_block(saved: Saved, stored: Stored, like: Tensor, order: Tensor | None) -> Tensor:
    """Returns the block of a stored tensor that this rank has of `like`."""
    shape, offset = place_of(like)
    if order is None or not shape[0]:
        return saved.tensor(stored, offset, shape)
    pieces = pieces_of_block(order, shape, offset)
    return torch.cat([saved.tensor(stored, (rows.in_whole, *offset[1:]), (rows.number, *shape[1:])) for rows in pieces])


def load_state(
    saved: Saved,
    value: Any,
    key: str,
    group: Tree,
    parameter: Tensor,
    saved_dtype: torch.dtype | None,
    order: Tensor | None = None,
) -> Any:
    """Returns a value of a parameter's optimizer state, placed as the parameter is where it has its shape.

    saved_dtype: the parameter's in the checkpoint; what has it gets the dtype that the parameter has here. None: the
    state was that of a flat copy in a dtype of its own, as DeepSpeed's: all gets the parameter's, as torch demands.
    order: of the parameter's rows.
    """
    if not isinstance(value, Stored):
        return tree_map_only(
            Tensor, lambda tensor: tensor.to(parameter.device), saved.plain(value)
        )  # LBFGS keeps lists
    dtype = parameter.dtype if saved_dtype in (None, saved.dtype(value)) and saved.shape(value) else saved.dtype(value)
    # The state of an engine that flattens parameters.
    flat = saved.shape(value) == (parameter.numel(),) and parameter.dim() != 1
    flat = flat and "history_size" not in group  # LBFGS's own vectors stay as they are
    if is_shard(parameter) and (flat or saved.shape(value) == tuple(parameter.shape)):
        shape, offset = place_of(parameter)
        if flat:
            unflattened = saved.tensor(value).view(parameter.shape)
            unflattened = unflattened if order is None else unflattened[order]
            block = unflattened[tuple(slice(start, start + size) for start, size in zip(offset, shape))].to(
                parameter.device, dtype
            )
        else:
            block = stored_block(saved, value, parameter, order).to(parameter.device, dtype)
        return sharded_like(block, parameter)
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))  # as torch's load_state_dict does
    tensor = saved.tensor(value).to("cpu" if on_host else parameter.device, dtype)
    return tensor.view(parameter.shape) if flat else tensor


@dataclass(frozen=True)
class Position:
    """How far a training is. skipped: of the steps done. last: after how many patience has ended it; None: not yet."""

    done: int = 0
    skipped: int = 0
    last: int | None = None


class Saving(Part):
    """One training's state and its checkpoints."""

    def __init__(self, job: Job, world: World, checkpoints: Checkpoints) -> None:
        self.job, self.world, self.checkpoints = job, world, checkpoints
        self._saved: Saved | None = None  # the one from which the training continues
        self._evaluator: Any = None
        self._taken = -1

    def load(self, state: Callable[[], StateDict] | None) -> Position:
        """Loads the checkpoint from which the training continues. Returns its position. state: as Run.register's."""
        training = self.training
        stateful = {name: part for name, part in training.stateful.items() if part is not None}
        self._evaluator = stateful.get("evaluations")
        registered = (training.model, training.optimizer, stateful, training.carried)
        self._state = TrainingState(self.world, *registered, state, recipe=_recipe(self.job))
        saved = self.checkpoints.load()
        if saved is None:
            return Position()
        check_parts(saved)
        position = from_json(Position, saved.state["position"], f"the position in {saved.folder}")
        if position.done != saved.manifest.step:
            raise UserError(foreign(saved.folder, message("state_of_another_step", step=position.done)))
        self._state.load(saved, in_epoch=position.done % training.schedule.steps_per_epoch != 0)
        if self.world.rank == 0 and self._evaluator is not None:
            for file in self._evaluator.files():
                with saved.open(file.name) as content:
                    replace_by(file, partial(shutil.copyfileobj, content))
        if self.checkpoints.other_evaluation and self._evaluator is not None:
            self._evaluator.forget_best()
        self._saved, self._taken = saved, position.done
        return position

    def begin_fragments(self, fragments: Sequence[Fragment]) -> None:
        """Registers the fragments of an optimizer's flat parameters, and loads their state."""
        self._state.load_fragments(self._saved, fragments)

    def load_ema(self, ema: Ema) -> None:
        """Gives the averages of the weights what is in the checkpoint from which the training continues."""
        if self._saved is not None:
            self._state.load_ema(self._saved, ema)

    def drawn(self, step: int) -> None:
        self.checkpoints.before(step)

    def counted(self) -> None:
        """Takes a checkpoint where it is time."""
        if self.checkpoints.is_due(self.training.count.done, self.training.schedule.steps_per_epoch):
            self.save()

    def stopped(self) -> None:
        self.save()

    def save(self) -> None:
        """Takes a checkpoint, unless this step's is taken already, or a loss is not finite, which raises UserError."""
        count = self.training.count
        heartbeat.begin(CHECKPOINT, count.done)
        self.training.meter.flush()
        if count.done == self._taken:
            return
        self._taken, self._saved = count.done, None  # which is loaded: its files can go
        tree = self._state.tree(self.training.ema)
        position = Position(count.done, count.skipped, count.ends)
        if self.world.rank == 0:
            tree["position"] = asdict(position)
            if self.checkpoints.identity:
                tree["identity"] = self.checkpoints.identity.tree()
        self.checkpoints.take(position.done, tree, self._evaluator.files() if self._evaluator is not None else ())


def _recipe(job: Job) -> list[str]:
    """Returns the names of the classes of the job's optimizers."""
    recipes = [phase.optimizer for phase in job.phases] or [job.optimizer]
    return [recipe.cls.__qualname__ for recipe in recipes]
