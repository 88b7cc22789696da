"""Random generators: their states on each rank, and the numbers that a script draws beside its model.

A recording keeps the numbers that are drawn with torch's functions between a loader and the loss, and not in the model,
so that a replay can give one process what all ranks together have drawn: a GAN's noise, a diffusion model's times and
noise, smoothed labels, and the places of batches that a script draws itself. There is a list for each event, which is
the start of a training forward or of a backward pass: what is drawn before it, since the event before or the latest
batch that was read. What is drawn before a batch is read (a sampler's order, in an evaluation) is in no list; of what
is drawn before the first event, whole numbers alone are, which may be the places of the first batch.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from samestep.rank.hooks import Hooks
from samestep.recorder.patches import in_backward
from samestep.records.script import RandomRecord
from samestep.records.torch_collectives import OF_ONE_TENSOR

RAND = ["rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"]
FUNCTIONS = [*RAND, "normal", "bernoulli", "multinomial", "poisson"]
METHODS = ["normal_", "uniform_", "random_", "bernoulli_", "exponential_", "bernoulli", "multinomial"]
DRAWS: list[tuple[Any, str]] = [*((torch, name) for name in FUNCTIONS), *((Tensor, name) for name in METHODS)]
NUMPY_FUNCTIONS = ("randint", "permutation", "choice", "rand", "randn", "random", "normal", "uniform", "beta")
SHARES = [function.name for function in OF_ONE_TENSOR if function.to_all and function.is_in_place]


def random_states() -> list[Tensor]:
    """Returns the states of torch's generators: the CPU's, and the current GPU's where it is in use."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else states


def set_random_states(states: Sequence[Tensor]) -> None:
    """Sets the states that random_states() has returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1 and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states[1])


def seed_anew(seed: int | None = None) -> None:
    """Seeds this process's random numbers: as those of a new process, from the system, or by a number."""
    random.seed(seed)
    torch.seed() if seed is None else torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


def state_digests() -> dict[str, str]:
    """Returns the digests of the states of all generators that a script is likely to use."""
    digests = {"torch": torch_state(), "python": digest(repr(random.getstate()).encode())}
    if numpy := sys.modules.get("numpy"):
        digests["numpy"] = digest(pickle.dumps(numpy.random.get_state()))
    return digests


def randomness() -> str:
    """Returns a digest that changes where one of these generators is drawn from."""
    return "".join(state_digests().values())


def torch_state() -> str:
    """Returns the digest of the states of torch's generators."""
    return digest(b"".join(state.numpy().tobytes() for state in random_states()))


def digest(data: bytes) -> str:
    """Returns the digest of a state."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def patch_shares(hooks: Hooks, before: Callable[[Tensor], None]) -> None:
    """Calls before(tensor) for each tensor that all ranks are given in common."""

    def new_share(share: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        before(tensor)
        return share(tensor, *args, **kwargs)

    for name in SHARES:
        hooks.attach(torch.distributed, name, new_share)


@dataclass
class ModelDraw:
    """A draw by one of torch's functions in a forward. before, after: digests of torch's state. common: whether it is
    no noise of the rank's rows: one number, a choice for all of them, or what all ranks are given in common."""

    before: str
    after: str
    shape: torch.Size
    common: bool


class Randoms:
    """Records the generators of one rank, around its training forwards."""

    def __init__(self) -> None:
        self.record = RandomRecord(states={}, draws=[], workers=[])
        self._in_model: list[ModelDraw] | None = None  # of the forward that goes on

    def before(self, step: int) -> str:
        """Returns the digest of torch's random state, where `step` has none yet. Called before each training
        forward."""
        if len(self.record.draws) > step:
            return ""
        if not self.record.states:
            self.record = RandomRecord(state_digests(), self.record.draws, self.record.workers)
        self._in_model = []
        return torch_state()

    def after(self, step: int, before: str) -> None:
        """Notes the digest that before() has returned. Called after each training forward."""
        if before:
            self.record.draws.extend([""] * (step - len(self.record.draws)))
            self.record.draws.append(self._state_of_noise(before))
        self._in_model = None

    def draw(self, call: Callable[[], Tensor]) -> Tensor:
        """Draws by a function of torch's in a model."""
        if self._in_model is None:
            return call()
        before, numbers = torch_state(), call()
        self._in_model.append(ModelDraw(before, torch_state(), numbers.shape, common=numbers.numel() == 1))
        return numbers

    def share(self, tensor: Tensor) -> None:
        """Notes that all ranks are given a tensor in common: the latest draw of its shape is no noise of the rows."""
        drawn = [draw for draw in self._in_model or () if draw.shape == tensor.shape and not draw.common]
        if drawn:
            drawn[-1].common = True

    def _state_of_noise(self, before: str) -> str:
        """Returns the state before the first draw that is the rank's own, as of dropout; '' where there is none."""
        state = before
        for draw in self._in_model or ():
            if draw.before != state or not draw.common:
                return state
            state = draw.after
        return state if torch_state() != state else ""

    def begin_pass(self, iterator: Any) -> None:
        """Notes the seed of a loader's workers."""
        if getattr(iterator, "_num_workers", 0):
            self.record.workers.append(int(iterator._base_seed))


@dataclass
class Drawn:
    """What was drawn before one event."""

    values: list[Tensor] = field(default_factory=list)
    """The numbers, in the order in which they were drawn."""

    for_gradients: list[bool] = field(default_factory=list)
    """Whether each of them was drawn where gradients are computed, and not in an evaluation."""

    after_read: bool = False
    """Whether a batch was read before it, after the event before."""

    places_only: bool = False
    """Whether of these draws only those of whole numbers are kept, as before the first event."""

    def __len__(self) -> int:
        return len(self.values)

    def keep(self, numbers: Tensor) -> None:
        """Keeps numbers that have just been drawn."""
        self.values.append(numbers)
        self.for_gradients.append(torch.is_grad_enabled())

    def outside_evaluations(self) -> Drawn:
        """Returns what of it was drawn where gradients are computed."""
        values = [numbers for numbers, is_kept in zip(self.values, self.for_gradients) if is_kept]
        return replace(self, values=values, for_gradients=[True] * len(values))


def are_places(numbers: Tensor) -> bool:
    """Returns whether numbers may be the places of a batch's rows."""
    return numbers.numel() > 1 and not numbers.is_floating_point()


def patch_draws(hooks: Hooks, around: Callable[[Callable[[], Tensor]], Tensor]) -> None:
    """Calls around(call) for each of torch's functions that draw random numbers, instead of it."""

    def new_draw(draw: Any, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or in_backward():
            return draw(*args, **kwargs)
        return around(functools.partial(draw, *args, **kwargs))

    for owner, name in DRAWS:
        hooks.attach(owner, name, new_draw)


def patch_numpy_draws(hooks: Hooks, around: Callable[[Callable[[], Tensor]], Tensor]) -> None:
    """Calls the same around(call) for functions of numpy.random: its numbers as a tensor, which may be replaced."""

    def new_draw(draw: Any, /, *args: Any, **kwargs: Any) -> Any:
        drawn: Any = None

        def call() -> Tensor:
            nonlocal drawn
            drawn = draw(*args, **kwargs)
            return torch.as_tensor(drawn)

        try:
            numbers = around(functools.partial(call))
        except (TypeError, ValueError):  # no numbers are drawn, but things
            if drawn is None:
                raise
            return drawn
        if type(drawn).__name__ == "ndarray":  # which shares the tensor's memory where it has its shape
            return drawn if drawn.shape == tuple(numbers.shape) else numbers.numpy()
        return type(drawn)(numbers.item()) if numbers.numel() == 1 else drawn

    for name in NUMPY_FUNCTIONS if "numpy" in sys.modules else ():
        hooks.attach(sys.modules["numpy"].random, name, new_draw)


def joined_draws(parts: Sequence[Tensor], shape: torch.Size, rows: int = 0) -> Tensor | None:
    """Returns what one process draws in the place of several ranks: numbers for all rows, or those of every rank.

    rows: how many rows a rank's batch has. Where the script draws for so many rows by itself, one process is given the
    numbers of all ranks. None where each rank has drawn other ones for all of its rows.
    """
    first = parts[0]
    same = all(torch.equal(first, part) for part in parts)
    if not same and first.numel() > 1 and all(part.shape == shape and len(part) == rows for part in parts):
        return torch.cat(list(parts))
    have_rows = shape and all(part.dim() and part.shape[1:] == shape[1:] for part in parts)
    if have_rows and sum(map(len, parts)) == shape[0]:
        return torch.cat(list(parts))
    return first if same and first.shape == shape else None
