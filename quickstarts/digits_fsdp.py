"""digits on fsdp: one script that does not need samestep, which wrote it. Start it with

    python -m torch.distributed.run --nproc-per-node=2 digits_fsdp.py

It trains, saves weights.pt and evaluates them, each row once. The last line holds the settings. First comes the job,
then the engine's loop, `train`, then the code that both need, each under the name of its file in samestep.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import math
import os
import random
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from importlib.util import find_spec
from math import ceil
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Generator, Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

# ----------------------------------------------------------------------------------------------------------------------
# samestep/jobs/digits.py

"""digits: a small conv net on 1,797 real scanned digits, which ship inside scikit-learn. Nothing is downloaded.

The scans are 8x8 pixels from 43 writers: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", 1998.
The last 297 are held out, as scikit-learn's own example does with its later half.

Any number of ranks trains what one process trains: GroupNorm normalises over a row alone, where BatchNorm would take
the rows of each rank, and nothing draws random numbers. The network is wide enough for a second core to pay: see
docs/results.md, "When more ranks are slower".
"""


TRAIN_ROWS = 1500


def read() -> torch.Tensor:
    """Returns the 64 pixels (0 to 16) and the label of each scan. shape [1797, 65], int64

    From scikit-learn's file, as its load_digits() does: importing scikit-learn takes as long as importing torch.
    """
    package = find_spec("sklearn")
    assert package and package.origin, "scikit-learn, which holds the scans, is not installed"
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    return torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.int64))


def job(
    global_batch: int = 128,
    lr: float = 0.05,
    epochs: int = 10,
    width: int = 80,
    seed: int = 0,
    workers: int = 0,
) -> Job:
    scans = read()
    images = scans[:, :-1].float().reshape(-1, 1, 8, 8) / 16
    labels = scans[:, -1]

    def model() -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.GroupNorm(1, width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 10),
        )

    def cosine(optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
        return CosineAnnealingLR(optimizer, epochs * ceil(TRAIN_ROWS / global_batch))

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": lr, "momentum": 0.9, "weight_decay": 5e-4}),
        scheduler=LRSchedule(cosine),
        train=TensorDataset(images[:TRAIN_ROWS], labels[:TRAIN_ROWS]),
        evaluation=TensorDataset(images[TRAIN_ROWS:], labels[TRAIN_ROWS:]),
        metrics={"accuracy": lambda output, batch: output.argmax(1) == batch.targets},
        global_batch=global_batch,
        epochs=epochs,
        seed=seed,
        workers=workers,
    )


# ----------------------------------------------------------------------------------------------------------------------
# samestep/engines/fsdp.py

"""fsdp: FSDP2's fully_shard; parameters, gradients and optimizer state are sharded over the ranks.

wrap: what is sharded as one unit: the blocks that the model repeats ('auto'), each of its children, each module of the
class that is named, or the whole model ('root').
reshard: free the gathered parameters after the forward pass. precision: compute in bf16, reduce in float32.
checkpoint: activation checkpointing of each unit.
Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""


def train(
    job: Job,
    world: World,
    run: Run,
    *,
    wrap: str = "auto",
    reshard: bool = True,
    precision: Literal["full", "bf16"] = "full",
    checkpoint: bool = False,
) -> State:
    with process_group(world):
        model: Any = job.model().to(world.device)
        units = units_of(model, wrap)
        if checkpoint:  # but no unit with BatchNorm: computed twice, it would count every batch twice
            again = units or units_of(model, "auto")
            apply_activation_checkpointing(model, check_fn=lambda unit: unit in again and not batch_norms(unit))
        mesh, lower = init_device_mesh(world.device.partition(":")[0], (world.size,)), MixedPrecisionPolicy()
        if precision != "full":
            lower = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            for norm in batch_norms(model):  # their statistics stay float32, and so must their weights
                fully_shard(norm, mesh=mesh)
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": lower, "reshard_after_forward": reshard}
        for unit in units:
            if precision == "full" or unit not in batch_norms(model):
                fully_shard(unit, **options)
        fully_shard(model, **options)
        optimizer = job.optimizer.build(model)  # after sharding: of the shards
        scheduler = job.lr_scheduler(optimizer)
        run.register(model, optimizer, scheduler=scheduler)
        for batch in run.batches():
            model.set_requires_gradient_sync(batch.completes_step)
            loss = run.loss(model, batch)
            loss.backward()
            if batch.completes_step:
                if job.clip_norm is not None:
                    clip_grad_norm_(model.parameters(), job.clip_norm)
                optimizer.step()
                optimizer.zero_grad()
                if job.moves_lr(batch):
                    scheduler.step()
                run.step(loss)
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def batch_norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


# ----------------------------------------------------------------------------------------------------------------------
# samestep/rank/fsdp_units.py

"""Finds the units of a model that FSDP shards: modules whose parameters are gathered together.
"""


def units_of(model: nn.Module, wrap: str) -> list[nn.Module]:
    """Returns the modules to shard, inner ones first, without the model itself, which holds what they leave.

    wrap: 'auto', the repeated blocks (modules of one class in a list), or the children where no class is repeated;
    'children', the model's children; 'root', none; or the name of a class, each module of it.
    A module is left out that shares a parameter with a module outside of it (tied weights), or has one that the forward
    of a module outside of it reads: there the parameter would not be gathered. Raises UserError for an unknown class.
    """
    if wrap == "root":
        return []
    if wrap == "auto":
        found = list(_blocks(model)) or list(_children(model))
    elif wrap == "children":
        found = list(_children(model))
    else:
        found = _of_class(model, wrap)
    holders: dict[int, list[nn.Module]] = {}  # of each parameter
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(module)
    for reader, parameter in _reads(model):
        holders[id(parameter)].append(reader)
    units: dict[int, nn.Module] = {}  # by id: a module may be the child of several
    for module in found:
        inside = set(module.modules())
        own = [holders[id(parameter)] for parameter in module.parameters()]
        if own and all(inside.issuperset(of) for of in own):
            units[id(module)] = module
    return [module for module in reversed([*model.modules()]) if id(module) in units]


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """Yields a module's children that are called: in the place of a list of modules, its items."""
    for child in module.children():
        if _is_called(child):
            yield child
        else:
            yield from _children(child)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost modules that stand with another of their class in a list: a Sequential, a ModuleList, or a
    ModuleDict of one class."""
    children = list(module.children())
    count = Counter(type(child) for child in children)
    is_list = isinstance(module, nn.Sequential | nn.ModuleList) or (
        isinstance(module, nn.ModuleDict) and len(count) < 2
    )
    for child in children:
        if is_list and count[type(child)] > 1 and _is_called(child):
            yield child
        else:
            yield from _blocks(child)


def _is_called(module: nn.Module) -> bool:
    """Returns whether a module has a forward, which lists of modules and of parameters have not."""
    return type(module).forward is not nn.Module.forward


def _of_class(model: nn.Module, name: str) -> list[nn.Module]:
    inner = [module for module in model.modules() if module is not model and _is_called(module)]
    found = [module for module in inner if type(module).__name__ == name]
    if not found:
        classes = {type(module).__name__ for module in inner if any(True for _ in module.parameters())}
        raise UserError(
            f"--set-engine fsdp.wrap={name}: the model has no module of this class; name one of "
            f"{', '.join(sorted(classes)) or 'none'}, or give auto, children or root"
        )
    return found


def _reads(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yields (module, parameter) where a module's forward reads a parameter of another module, as in
    F.linear(x, self.wte.weight). Found in the source of forward and of the methods that it names; not through a list's
    index, nor where there is no source: there the training fails, and the engine explains its error."""
    for module in model.modules():
        cls: Any = type(module)  # which mypy does not take for hashable
        for path in _paths(cls):
            try:
                value: Any = attrgetter(path)(module)
            except Exception:  # a property that fails, or an attribute that is set later
                continue
            if isinstance(value, nn.Parameter):
                yield module, value


@cache
def _paths(cls: Any) -> frozenset[str]:
    """Returns what the forward of a class of modules reads of self: {'wte.weight', 'wte', …}."""
    found: set[str] = set()
    waiting, seen = ["forward"], set[str]()
    while waiting:
        name = waiting.pop()
        method = inspect.getattr_static(cls, name, None)
        if name in seen or not inspect.isfunction(method):
            continue
        seen.add(name)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
        except (OSError, SyntaxError):
            continue
        myself = next(iter(inspect.signature(method).parameters), "")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                of, _, path = ast.unparse(node).partition(".")
                if of == myself and all(part.isidentifier() for part in path.split(".")):
                    found.add(path)
        waiting += [path for path in found if "." not in path]
    return frozenset(found)


# ----------------------------------------------------------------------------------------------------------------------
# samestep/engine.py

"""The Engine protocol. An engine is one module in engines/; its function `train` holds the whole training loop.
"""


State = dict[str, Any]  # a module's state dict


# ----------------------------------------------------------------------------------------------------------------------
# samestep/tasks/eject/runtime/run.py

"""Run, which the engine's loop trains with: this rank's batches in order, their losses, and a count of the steps.
"""


CLOSURE = "an optimizer whose step needs a closure"


@dataclass(frozen=True)
class World:
    """The place of this process in the training.

    rank: this process among `size`; local_size: how many are on this machine. devices: what this process drives.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1
    devices: tuple[str, ...] = ("cpu",)

    @property
    def device(self) -> str:
        return self.devices[0]

    def gather(self, value: Any) -> list[Any]:
        """Gathers a value from each rank, in rank order, on every rank."""
        return [value]

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copies the values of rank 0's tensors into every rank's."""


def special_parts(job: Job, size: int) -> set[str]:
    """The parts of a job on `size` ranks that take more in a step than forward, backward and an update."""
    parts = {
        "ema": job.ema,
        "carry_state": job.carry_state,
        "gather_outputs": job.gather_outputs and size > 1,
        "phases": job.phases,
        "a scheduler with every='evaluation'": job.scheduler and job.scheduler.every == "evaluation",
        CLOSURE: job.optimizer and job.optimizer.needs_closure,
    }
    return {name for name, has in parts.items() if has}


class Run:
    """One training of `job` on this rank. supports: the special_parts that it trains."""

    supports: frozenset[str] = frozenset()

    def __init__(self, job: Job, world: World) -> None:
        if absent := special_parts(job, world.size) - self.supports:
            raise SystemExit(f"this script cannot train a job with {', '.join(sorted(absent))}: train it with samestep")
        self.job, self.world = job, world
        self.schedule = schedule_of(job, world.size)
        self.steps, self.done = job.steps(self.schedule.steps_per_epoch), 0
        self.latest = torch.zeros(())

    def register(self, model: nn.Module, optimizer: Optimizer, **_: Any) -> None:
        """Called when model and optimizer are ready: the place to load a checkpoint, or to log."""

    def batches(self) -> Iterator[Batch]:
        """Yields this rank's micro-batches on its device, in the schedule's order."""
        return loaded(self.job, self.schedule.parts(self.world.rank, self.steps), self.world.device)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Computes the mean loss over the batch's rows times its share: the ranks' average is exact when uneven."""
        part, devices = batch.part, self.world.devices
        for replica, device in enumerate(devices, self.world.rank * len(devices)):  # each replica its own dropout
            random_stream(device).manual_seed(key(self.job.seed, "replica", part.step, part.micro, replica))
        kept = [(b, b.clone()) for b in model.buffers()] if part.rows == 0 else []
        loss, share = self.loss_and_share(model, batch)
        for buffer, value in kept:  # a rank without rows leaves no trace in BatchNorm's statistics
            buffer.data.copy_(value)
        self.latest = loss.detach()
        return loss if share == 1.0 else loss * share

    def loss_and_share(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        """The mean loss over the batch's rows, and the factor by which the ranks' average of it is exact."""
        return self.job.criterion(self.job.forward(model, batch), batch), batch.part.share

    def closure(self, backward: Callable[[Batch], Tensor]) -> tuple[Callable[[], Any], ...]:
        """The arguments of the optimizer's step: none. LBFGS would be given a function that calls `backward`."""
        return ()

    def step(self, loss: Tensor, *, skipped: bool = False) -> None:
        """Called after each optimizer step. skipped: after an overflow, a GradScaler left the weights as they were."""
        self.done += 1
        if self.world.rank == 0 and (self.done % 10 == 0 or self.done == self.steps):
            print(f"step {self.done} of {self.steps}: loss {self.latest.item():.6g}", flush=True)


def random_stream(device: str) -> Generator:
    """The random stream that dropout on `device` draws from."""
    if device == "cpu":
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[torch.device(device).index or 0]


class Fetched(Dataset[Any]):
    """The job's training data by the part: its rows, augmented and collated."""

    def __init__(self, job: Job) -> None:
        self.job, self.epoch = job, -1
        self.dataset: Any = job.train
        self.keyed = KeyedRandom()

    def __getitem__(self, part: Part) -> tuple[Part, Any]:
        if part.epoch != self.epoch:
            self.epoch = part.epoch
            set_epoch = next(filter(None, (getattr(each, "set_epoch", None) for each in nested(self.dataset))), None)
            if set_epoch:
                set_epoch(part.epoch)
        return part, self.keyed(lambda: self.collated(part))

    def collated(self, part: Part) -> Any:
        """The samples, augmented and collated. What they draw is keyed by the sample: alike on any number of ranks."""
        rows, repeats = part.indices.tolist(), part.indices * 0 if part.repeats is None else part.repeats
        keys = [(self.epoch, row, again) if again else (self.epoch, row) for row, again in zip(rows, repeats.tolist())]
        if self.keyed.drawn or not hasattr(self.dataset, "__getitems__"):
            samples = [self.sample(path) for path in keys]
        else:
            samples = list(self.dataset.__getitems__(rows))
        if self.job.augment:
            samples = [self.augmented(*pair) for pair in zip(samples, keys, strict=True)]
        self.keyed.seed(self.job.seed, "collate", *keys[0])
        return (self.job.collate or default_collate)(samples)

    def sample(self, path: tuple[int, ...]) -> Any:
        """Reads a sample, with the random generators seeded for it.

        path: the epoch, the row, and how often it has been read before in the epoch, if it has.
        """
        self.keyed.seed(self.job.seed, "sample", *path)
        data, row = self.dataset, path[1]
        return data.__getitems__([row])[0] if hasattr(data, "__getitems__") else data[row]

    def augmented(self, sample: Any, path: tuple[int, ...]) -> Any:
        assert self.job.augment
        self.keyed.seed(self.job.seed, "augment", *path)
        return self.job.augment(sample, Generator().manual_seed(key(self.job.seed, "augment", *path)))


def as_it_is(data: Any) -> Any:
    return data


def loaded(job: Job, parts: Iterable[Part], device: str) -> Iterator[Batch]:
    """The training data of `parts`, on a device. The job's loader workers fetch it ahead."""
    workers = job.workers if job.shuffle else min(job.workers, 1)  # each worker would read all of a stream
    loader: Any = DataLoader(
        Fetched(job),
        sampler=parts,
        batch_size=None,  # a part is fetched and collated whole
        collate_fn=as_it_is,
        num_workers=workers,
        prefetch_factor=job.prefetch if workers else None,
        multiprocessing_context="fork" if workers else None,  # others cannot take a job's lambdas
        pin_memory=device != "cpu",
        generator=Generator(),  # its own: starting workers must not draw from the training's stream
    )
    for part, data in loader:
        yield Batch(tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), data), part)


# ----------------------------------------------------------------------------------------------------------------------
# samestep/tasks/eject/runtime/evaluation.py

"""Saves the weights on rank 0, and evaluates them on all ranks, each row once.

The rows are cut into chunks that do not depend on the number of ranks, and a chunk's sums are added in the order of
the chunks: so the figures are the same to the last digit on any number of ranks.
"""


ROWS_AT_ONCE = 128  # at most; fewer where the job's micro-batch or global batch is smaller
WEIGHTS = "weights.pt"


def finish(job: Job, state: dict[str, Any], world: World) -> None:
    """Saves rank 0's state dict; evaluates it where the job has something to evaluate on."""
    if world.rank == 0:
        torch.save({n: t.detach().cpu() if isinstance(t, Tensor) else t for n, t in state.items()}, WEIGHTS)
        print(f"wrote {WEIGHTS}", flush=True)
    if job.evaluation is None:
        return
    means = evaluate(job, state, world)
    if world.rank == 0:
        said = ", ".join(f"{name} {mean!r}" for name, mean in means.items())
        print(f"evaluation over {len(job.evaluation)} rows, each once: {said}", flush=True)


def evaluate(job: Job, state: dict[str, Any], world: World) -> dict[str, float]:
    """The mean loss and each metric of rank 0's `state` over job.evaluation. The figures are equal on every rank."""
    assert job.evaluation is not None
    model = job.model().to(world.device)
    if world.rank == 0:
        model.load_state_dict(state)
    world.broadcast(value for value in model.state_dict().values() if isinstance(value, Tensor))
    model.eval()
    whole = [name for name, metric in job.metrics.items() if counts_by_itself(metric)]  # torchmetrics' own
    by_row = [name for name in job.metrics if name not in whole]
    mine: list[tuple[list[float], dict[str, Any]]] = []  # of each chunk: its sums, and what torchmetrics counted
    with torch.no_grad():
        evaluated = replace(job, train=job.evaluation, augment=None, order=None)
        for batch in loaded(evaluated, chunks(job, world), world.device):
            output = job.output(model, batch)
            states = {name: counted(job.metrics[name], output, batch) for name in whole}
            mine.append((sums(job, by_row, output, batch), states))
    of_chunk = [chunk for of_rank in world.gather(mine) for chunk in of_rank]
    rows, weight, loss, *totals = (math.fsum(column) for column in zip(*(numbers for numbers, _ in of_chunk)))
    means = {"loss": loss / weight} | {name: total / rows for name, total in zip(by_row, totals)}
    means |= {name: merged(job.metrics[name], [states[name] for _, states in of_chunk]) for name in whole}
    return {name: means[name] for name in ("loss", *job.metrics)}


def chunks(job: Job, world: World) -> list[Part]:
    """This rank's chunks of the evaluation's rows, none padded."""
    assert job.evaluation is not None
    length, at_once = len(job.evaluation), min(job.micro_batch or job.global_batch, ROWS_AT_ONCE)
    every = [np.arange(first, min(first + at_once, length)) for first in range(0, length, at_once)]
    per_rank = cut(len(every), world.size)
    first = sum(per_rank[: world.rank])
    parts = []
    for rows in every[first : first + per_rank[world.rank]]:
        weight = float(sum(map(job.evaluation_weight, rows.tolist())) if job.evaluation_weight else len(rows))
        parts.append(Part(0, 0, 0, rows, len(rows), weight, 1.0, completes_step=True, completes_epoch=False))
    return parts


def sums(job: Job, by_row: list[str], output: Any, batch: Batch) -> list[float]:
    """[rows, weight, loss times weight, each metric by row] of one chunk."""
    rows, weight = batch.part.rows, batch.part.weight
    loss = (job.criterion(output, batch) * weight).item() if weight else 0.0  # rows that all weigh 0 have no mean
    found = [job.metrics[name](output, batch) for name in by_row]
    for name, values in zip(by_row, found):
        if list(values.shape) != [rows]:
            raise ValueError(f"the metric {name} gave shape {list(values.shape)} for {rows} rows; return one for each")
    return [float(rows), weight, loss, *(values.double().sum().item() for values in found)]


def counted(metric: Any, output: Any, batch: Batch) -> dict[str, Any]:
    """What a metric of torchmetrics counts in one chunk, on the CPU."""
    metric.reset()
    metric.to(output.device if isinstance(output, Tensor) else "cpu")
    metric.update(output, batch if reads_batch(metric) else batch.targets)
    state: dict[str, Any] = tree_map_only(Tensor, lambda tensor: tensor.to("cpu"), metric.metric_state)
    metric.reset()
    return state


def merged(metric: Any, states: list[dict[str, Any]]) -> float:
    """The metric of all chunks, in their order."""
    metric.reset()
    metric.to("cpu")
    for state in reversed(states):  # a state that is merged goes before what is there
        metric.merge_state(state)
    metric.distributed_available_fn = lambda: False  # the states are of all ranks: it must not add them up again
    with warnings.catch_warnings():  # it has merged, and not been updated
        warnings.simplefilter("ignore")
        return float(metric.compute())


# ----------------------------------------------------------------------------------------------------------------------
# samestep/job/batch.py

"""What a training gives to a job's functions: Batch, with its Part of the schedule, and StepInfo.
"""


@dataclass(frozen=True)
class Part:
    """One rank's rows of one micro-batch. step: counted over all epochs, from 0.

    indices: the sample indices to fetch. rows: how many of them count; 0 where the rank has no rows in this step and
    computes other ranks' rows times zero. weight: the sum of their weights.
    share: weight x world size / weight of the whole step. An engine averages gradients over the ranks, so the mean
    over this rank's rows, times its share, averages to the exact mean over the global batch.
    repeats: how often each row has come before in this epoch; None where every row comes once.
    phase: the number of the job's phase that takes this step; 0 of a job without phases.
    """

    epoch: int
    step: int
    micro: int
    indices: NDArray[np.int64]
    rows: int
    weight: float
    share: float
    completes_step: bool
    completes_epoch: bool
    repeats: NDArray[np.int64] | None = None
    phase: int = 0


@dataclass(frozen=True)
class Batch:
    """The rows of one micro-batch on one rank, on its device.

    data: the collated samples. Of an (inputs, targets) pair, `inputs` and `targets` are the halves; otherwise `inputs`
    is all of it and `targets` is None.
    part: the rows' step, micro-batch, sample indices and share of the step.
    fetch_s: seconds that a loader process took to fetch them; None where the training process fetched them.
    fetch_cpu_s: the CPU time of these; the rest was spent waiting for a disk, a network or a CPU.
    state: what `forward` returned for the same rows of the step before, with Job.carry_state; None where an epoch
    begins, in an evaluation, and without carry_state.
    """

    data: Any
    part: Part
    fetch_s: float | None = None
    fetch_cpu_s: float = 0.0
    state: Any = None

    @property
    def inputs(self) -> Any:
        return self.data[0] if _is_pair(self.data) else self.data

    @property
    def targets(self) -> Any:
        return self.data[1] if _is_pair(self.data) else None

    @property
    def completes_step(self) -> bool:
        """True on the last micro-batch of a step, after which the optimizer steps."""
        return self.part.completes_step

    @property
    def completes_epoch(self) -> bool:
        """True on the last micro-batch of an epoch."""
        return self.part.completes_epoch


def _is_pair(data: Any) -> bool:
    return isinstance(data, (list, tuple)) and len(data) == 2


def counts_by_itself(metric: Any) -> bool:
    """Whether a metric is a torchmetrics one, with a state over many batches, not a function of each row."""
    return hasattr(metric, "merge_state")


def reads_batch(metric: Any) -> bool:
    """Whether a torchmetrics metric is updated with (output, batch), because its update's second argument is `batch`;
    others are with (output, batch.targets)."""
    return "batch" in inspect.signature(metric.update).parameters


def apply_to_inputs(model: nn.Module, batch: Batch) -> Any:
    """Calls the model with the batch's inputs: the default `forward`."""
    return model(batch.inputs)


def output_and_state(returned: Any) -> tuple[Any, Any]:
    """Returns the two halves of what a forward with Job.carry_state returned. Raises UserError for anything else."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise UserError(
            f"carry_state=True: forward returned {shown(returned)}, not a pair (output, state); return the state too, "
            "or leave carry_state out"
        )
    return returned


@dataclass(frozen=True)
class StepInfo:
    """What Job.on_step is given after each optimizer step, on rank 0.

    step: how many have been taken. epoch: counted from 0. loss: the mean over rank 0's rows. rates: the learning rate
    of each parameter group in this step. rows: of the step, over all ranks. seconds: of the step, and wait_s: how many
    of them it waited for data.
    """

    step: int
    epoch: int
    loss: float
    rates: tuple[float, ...]
    rows: int
    seconds: float
    wait_s: float

    @property
    def samples_per_second(self) -> float:
        return self.rows / self.seconds if self.seconds else 0.0


# ----------------------------------------------------------------------------------------------------------------------
# samestep/job/checks.py

"""Checks the values that a Job is made of; each error names what to write instead.
"""


def nested(dataset: Any) -> Iterator[Any]:
    """Yields a dataset and those that it wraps, as Subset does: its `dataset`, the `dataset` of that, …"""
    seen: set[int] = set()  # a dataset that wraps itself would never end
    while dataset is not None and id(dataset) not in seen:
        seen.add(id(dataset))
        yield dataset
        dataset = getattr(dataset, "dataset", None)


def shown(value: Any) -> str:
    """Returns what a value is, for a sentence: 'the class SGD', 'a function', 'an instance of Net', …"""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return "a function"
    return (
        repr(value)
        if value is None or isinstance(value, str | int | float)
        else f"an instance of {type(value).__name__}"
    )


# ----------------------------------------------------------------------------------------------------------------------
# samestep/errors.py

"""The errors that a user sees: each is one sentence that names the problem and its fix.
"""


class UserError(Exception):
    """A mistake in the user's input. The command prints the sentence and exits with 2."""


# ----------------------------------------------------------------------------------------------------------------------
# samestep/job/fields.py

"""JobFields: what a job holds, and what a training asks of it. Job, in the folder's __init__, checks the values.
"""


@dataclass(frozen=True)
class JobFields:
    """A training job. See docs/job.md for each field with an example. Job(…) raises UserError for invalid values.

    model: builds the network, with identical weights at every call.
    criterion: (output, batch) -> scalar, the mean over the rows of the batch.
    phases: several optimizers, which take steps in turn on the same rows, each with its own parameters, criterion and
        forward; `optimizer` is then left out. Without a `criterion` the first phase's is evaluated, on its forward.
    metrics: name -> (output, batch) -> one value per row (shape [rows]), or a torchmetrics metric, which is called with
        (output, batch.targets), or with (output, batch) where its update's second argument is named batch; evaluation
        sums them exactly.
    global_batch: rows of one optimizer step, over all ranks.
    micro_batch: the most rows that a rank processes at once; None: all of its rows.
    gather_outputs: the criterion sees the outputs and the batches of all ranks, and so all rows of a step at once.
    ema: the decay of an exponential moving average of the weights, which is evaluated and saved in their place.
    save: what weights.safetensors holds: all weights and buffers, or the trainable ones, as of a LoRA.
    carry_state: forward returns (output, state), and finds the state of the same rows in the next step's batch.state,
        detached; the criterion and the metrics see the output.
    clip_norm: the global norm that gradients are clipped to before the optimizer steps.
    weight: (index) -> the weight of a training sample in the criterion's mean (for instance its tokens); None: every
        row weighs 1. evaluation_weight: the same for the evaluation's samples.
    augment: (sample, generator) -> sample; the generator is seeded by (seed, epoch, index), never by rank or worker.
    max_steps: optimizer steps, of all phases together, after which the training ends, whatever `epochs` is; None:
        after `epochs`.
    last: keep or drop an epoch's incomplete last batch.
    order: an epoch's rows in their order: Weighted, ByLength, Lanes, or (epoch, generator) -> indices; None: by
        `shuffle`.
    shuffle: whether each epoch is shuffled anew; False: the dataset's order, as a Stream needs.
    sync_batchnorm: BatchNorm's statistics over all ranks' rows, with torch's SyncBatchNorm (on GPUs only).
    workers: loader processes per rank; 0 loads in the training process, where a plain TensorDataset is always indexed.
    prefetch: batches that each loader process loads in advance.
    on_step: (StepInfo) -> None, called on rank 0 of `run` after each step, some steps late. on_evaluation:
        (step, metrics) -> None, called there after each evaluation. What they raise does not end the training.
    """

    model: Callable[[], nn.Module]
    criterion: Callable[[Any, Batch], Tensor] = None  # type: ignore[assignment]  # the first phase's
    optimizer: Recipe = None  # type: ignore[assignment]  # made of the phases'
    train: Dataset = None  # type: ignore[assignment]
    global_batch: int = 0
    evaluation: Dataset | None = None
    forward: Callable[[nn.Module, Batch], Any] = apply_to_inputs
    metrics: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    collate: Callable[[list[Any]], Any] | None = None
    augment: Callable[[Any, Generator], Any] | None = None
    weight: Callable[[int], float] | None = None
    evaluation_weight: Callable[[int], float] | None = None
    scheduler: LRSchedule | None = None
    epochs: int = 1
    max_steps: int | None = None
    ema: float | None = None
    save: Literal["all", "trainable"] = "all"
    seed: int = 0
    micro_batch: int | None = None
    gather_outputs: bool = False
    clip_norm: float | None = None
    last: Literal["keep", "drop"] = "keep"
    order: Weighted | ByLength | Lanes | Callable[[int, Generator], Sequence[int]] | None = None
    shuffle: bool = True
    sync_batchnorm: bool = False
    workers: int = 0
    prefetch: int = 2
    on_step: Callable[[StepInfo], None] | None = None
    on_evaluation: Callable[[int, dict[str, float]], None] | None = None
    # Younger fields come last: jobs that give theirs by place stay as they are.
    phases: Sequence[Phase] = ()
    carry_state: bool = False

    def output(self, model: nn.Module, batch: Batch) -> Any:
        """Calls `forward`. Returns its output, without the state where it carries one."""
        returned = self.forward(model, batch)
        return output_and_state(returned)[0] if self.carry_state else returned

    def steps(self, steps_per_epoch: int) -> int:
        """Returns the optimizer steps of the whole training."""
        return self.max_steps or self.epochs * steps_per_epoch

    def lr_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        """Builds the job's scheduler of `optimizer` for the training loop; a constant one where the job has none, and
        where evaluations step it, outside of the loop."""
        from torch.optim.lr_scheduler import LambdaLR

        if self.scheduler is None or self.scheduler.every == "evaluation":
            return LambdaLR(optimizer, lambda _: 1.0)
        return self.scheduler.make(optimizer)

    def moves_lr(self, batch: Batch) -> bool:
        """Whether the scheduler steps after this batch: when it completes a step (of the last phase), or an epoch."""
        if self.scheduler is None or self.scheduler.every == "evaluation":
            return False
        if self.scheduler.every == "epoch":
            return batch.completes_epoch
        return batch.completes_step and batch.part.phase == max(0, len(self.phases) - 1)  # alike for all phases


# ----------------------------------------------------------------------------------------------------------------------
# samestep/tasks/eject/runtime/job.py

"""The job of a script: samestep has checked its values, so that a script holds the fields alone.
"""


@dataclass(frozen=True)
class Job(JobFields):
    """A training job."""


# ----------------------------------------------------------------------------------------------------------------------
# samestep/data/schedule.py

"""Schedule: which rank trains on which sample at which step. A pure function of the job's numbers, without I/O.

Global batch t is the same set of samples for every world size. In an epoch each sample comes once. A step has the same
number of micro-batches on every rank. The low ranks get the remainders, so rank 0 always has rows.
"""


FILL_ROWS = 2  # of the dummy batch, with weight 0, of a rank without rows: the fewest that BatchNorm accepts


def key(*parts: int | str) -> int:
    """Returns a 63-bit seed for a path such as (seed, 'order', epoch). Different paths give independent streams."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@lru_cache(maxsize=64)
def cut(rows: int, parts: int) -> tuple[int, ...]:
    """Returns the sizes of `parts` parts of `rows` rows, as even as possible, larger first: cut(7, 3) = (3, 2, 2)."""
    base, extra = divmod(rows, parts)
    return tuple(base + (i < extra) for i in range(parts))


@dataclass(frozen=True)
class Schedule:
    """The schedule of one training.

    length: rows of an epoch: the samples in the dataset, unless `ordered` says another number. global_batch: rows of
    one step over all ranks. world_size: number of ranks. micro_batch: the most rows of a micro-batch on one rank; None:
    no limit. last: whether to keep or drop an incomplete last batch. weight: of a sample, by its index. shuffle: False
    keeps the dataset's order in every epoch. ordered: the order of an epoch, where the job has its own. phases: how
    many steps each batch is trained for, one of each phase.
    """

    length: int
    global_batch: int
    world_size: int = 1
    seed: int = 0
    micro_batch: int | None = None
    last: Literal["keep", "drop"] = "keep"
    weight: Callable[[int], float] | None = None
    shuffle: bool = True
    ordered: Ordered | None = None
    phases: int = 1

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.length, self.global_batch)
        return (whole + (1 if rest and self.last == "keep" else 0)) * self.phases

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches in a step, the same on every rank."""
        most = ceil(self.global_batch / self.world_size)
        return ceil(most / self.micro_batch) if self.micro_batch else 1

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Returns the samples' indices in the order of this epoch, the same on every rank. shape [length]"""
        if self.ordered:
            return self.ordered.indices(self.length, self.global_batch, self.seed, epoch)
        return _order(self.length, self.seed, epoch) if self.shuffle else np.arange(self.length)

    def _global_batch(self, epoch: int, number: int) -> NDArray[np.int64]:
        start, end = number * self.global_batch, min((number + 1) * self.global_batch, self.length)
        return (
            self.order(epoch)[start:end] if self.shuffle else np.arange(start, end)
        )  # without an array of the whole epoch: a stream may be very long

    def step(self, rank: int, epoch: int, number: int) -> list[Part]:
        """Returns the rank's micro-batches of step `number` of `epoch`, in order.

        Raises UserError when the weights of the step's rows add up to 0.
        """
        batch, phase = divmod(number, self.phases)
        whole = self._global_batch(epoch, batch)
        per_rank = cut(len(whole), self.world_size)
        first = sum(per_rank[:rank])
        mine = whole[first : first + per_rank[rank]]
        total = self._weigh(whole)
        if not total > 0:
            raise UserError(f"the weights of the rows of step {number} add up to {total}; a mean needs more than 0")
        repeats = self.ordered.repeats(self.global_batch, self.seed, epoch) if self.ordered else None
        parts, at = [], 0
        for micro, rows in enumerate(cut(len(mine), self.micro_batches)):
            indices = mine[at : at + rows]
            place = batch * self.global_batch + first + at
            at += rows
            weight = self._weigh(indices)
            last = micro == self.micro_batches - 1
            parts.append(
                Part(
                    epoch=epoch,
                    step=epoch * self.steps_per_epoch + number,
                    micro=micro,
                    indices=indices if rows else np.resize(whole, FILL_ROWS),
                    rows=rows,
                    weight=weight,
                    share=weight * self.world_size / total,
                    completes_step=last,
                    completes_epoch=last and number == self.steps_per_epoch - 1,
                    repeats=repeats[place : place + rows] if repeats is not None and rows else None,
                    phase=phase,
                )
            )
        return parts

    def rows_of(self, steps: int) -> int:
        """Returns how many rows the first `steps` steps train on, over all ranks; each phase's step counts them."""
        epochs, more = divmod(steps, self.steps_per_epoch)
        of_epoch = min(self.length * self.phases, self.steps_per_epoch * self.global_batch)
        return epochs * of_epoch + more * self.global_batch

    def parts(self, rank: int, steps: int, first: int = 0) -> Iterator[Part]:
        """Yields the rank's micro-batches of the steps from `first` on, of the first `steps` steps."""
        for step in range(first, steps):
            yield from self.step(rank, *divmod(step, self.steps_per_epoch))

    def smallest_part(self) -> tuple[int, int, int]:
        """Returns (rows, step, rank) of the smallest part of an epoch that has rows. BatchNorm refuses one row."""
        return min(part for part in self._sizes() if part[0])

    def without_rows(self) -> tuple[int, int] | None:
        """Returns (step, rank) of the first part of an epoch without rows; None where each has some."""
        return next(((step, rank) for rows, step, rank in self._sizes() if not rows), None)

    def _sizes(self) -> Iterator[tuple[int, int, int]]:
        """Yields (rows, step, rank) of each part of an epoch's first and last step; the others are like the first."""
        final = self.steps_per_epoch - self.phases
        rows_of = {0: min(self.global_batch, self.length)}
        rows_of[final] = min(self.global_batch, self.length - final // self.phases * self.global_batch)
        for step, in_step in rows_of.items():
            for rank, in_rank in enumerate(cut(in_step, self.world_size)):
                for rows in cut(in_rank, self.micro_batches):
                    yield rows, step, rank

    def _weigh(self, indices: NDArray[np.int64]) -> float:
        return float(len(indices)) if self.weight is None else float(sum(self.weight(int(i)) for i in indices))


@dataclass(frozen=True)
class Ordered:
    """Job.order, of a dataset of `samples` samples: Weighted, ByLength, Lanes or a function."""

    by: Any
    samples: int

    def indices(self, rows: int, batch: int, seed: int, epoch: int) -> NDArray[np.int64]:
        """Returns the `rows` indices of an epoch. Raises UserError where a function gives another number of them."""
        found = _own_order(self.by, self.samples, batch, seed, epoch)
        if len(found) != rows:
            raise UserError(f"the job's order gave {rows} indices for epoch 0, and {len(found)} for epoch {epoch}")
        return found

    def repeats(self, batch: int, seed: int, epoch: int) -> NDArray[np.int64] | None:
        """Returns how often each row of an epoch has come before in it; None where no row is repeated."""
        once = isinstance(self.by, ByLength | Lanes)
        return None if once else _repeats(self.by, self.samples, batch, seed, epoch)


def schedule_of(job: Job, world_size: int) -> Schedule:
    """Returns the schedule of a job on `world_size` ranks."""
    numbers = (job.global_batch, world_size, job.seed, job.micro_batch, job.last, job.weight, job.shuffle)
    phases = max(1, len(job.phases))
    if job.order is None:
        return Schedule(len(job.train), *numbers, phases=phases)
    rows = len(_own_order(job.order, len(job.train), job.global_batch, job.seed, 0))
    if job.last == "drop" and rows < job.global_batch:
        raise UserError(
            f"last=drop leaves no step: order gives {rows} rows, fewer than global_batch {job.global_batch}"
        )
    return Schedule(rows, *numbers, Ordered(job.order, len(job.train)), phases)


def _generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(key(seed, "order", epoch))


@lru_cache(maxsize=2)
def _order(length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    order: NDArray[np.int64] = torch.randperm(length, generator=_generator(seed, epoch)).numpy()
    return order


@lru_cache(maxsize=3)
def _own_order(by: Any, samples: int, batch: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the indices of an epoch in the job's own order. Raises UserError for those that the dataset lacks."""
    generator = _generator(seed, epoch)
    if isinstance(by, Weighted):
        totals = np.cumsum(np.asarray(by.weights, dtype=np.float64))
        drawn = torch.rand(by.num_samples or samples, dtype=torch.float64, generator=generator).numpy() * totals[-1]
        chosen: NDArray[np.int64] = np.searchsorted(totals, drawn, side="right").clip(max=samples - 1)
        return chosen
    if isinstance(by, ByLength):
        rank = np.empty(samples, dtype=np.int64)
        rank[np.argsort(np.asarray(by.lengths), kind="stable")] = np.arange(samples)
        shuffled = torch.randperm(samples, generator=generator).numpy()
        kept, rest = np.split(shuffled, [samples - samples % batch])
        by_bucket = kept[np.argsort(rank[kept] * by.buckets // samples, kind="stable")]
        places = torch.randperm(len(kept) // batch, generator=generator).numpy()
        return np.concatenate([by_bucket.reshape(-1, batch)[places].reshape(-1), rest])
    if isinstance(by, Lanes):
        lanes = np.arange(samples - samples % batch).reshape(batch, -1)
        return np.concatenate([lanes.T.reshape(-1), np.arange(lanes.size, samples)])
    found = np.asarray(by(epoch, generator), dtype=np.int64).reshape(-1)
    if not len(found) or found.min() < 0 or found.max() >= samples:
        raise UserError(f"the job's order gives indices for epoch {epoch} that are not all of 0 to {samples - 1}")
    return found


@lru_cache(maxsize=2)
def _repeats(by: Any, samples: int, batch: int, seed: int, epoch: int) -> NDArray[np.int64]:
    order = _own_order(by, samples, batch, seed, epoch)
    places = np.argsort(order, kind="stable")
    repeats = np.empty(len(order), dtype=np.int64)
    repeats[places] = np.arange(len(order)) - np.searchsorted(order[places], order[places], side="left")
    return repeats


# ----------------------------------------------------------------------------------------------------------------------
# samestep/data/keyed_random.py

"""Keys the global random generators by sample, for datasets whose transforms draw from them.

Many transforms, torchvision's among them, draw from Python's `random`, numpy's global generator or torch's default one.
What these give depends on the process and on all that was drawn before, so that another number of ranks or of loader
workers would be another training. Here each sample is read with the generators seeded by (seed, epoch, index).
"""


Result = TypeVar("Result")


class KeyedRandom:
    """Seeds the global generators that a dataset draws from, and restores them.

    drawn: the names of those that it has drawn from so far. The others are neither seeded nor restored. Which these are
    is found by comparing all states before and after each batch.
    """

    def __init__(self) -> None:
        self.drawn: frozenset[str] = frozenset()

    def __call__(self, read: Callable[[], Result]) -> Result:
        """Returns read(), which calls seed() before each sample, and restores the generators.

        A read that is seen to draw from a generator for the first time is repeated, with this generator seeded.
        """
        while True:
            saved = {name: generator.state() for name, generator in GENERATORS.items()}
            try:
                result = read()
            finally:
                changed = {
                    name
                    for name, state in saved.items()
                    if name in self.drawn or not _same_state(state, GENERATORS[name].state())
                }
                for name in changed:
                    GENERATORS[name].restore(saved[name])
            if changed <= self.drawn:
                return result
            self.drawn |= changed

    def seed(self, *path: int | str) -> None:
        """Seeds the generators in `drawn` for a path such as (seed, 'sample', epoch, index)."""
        if self.drawn:
            number = key(*path)
            for name in self.drawn:
                GENERATORS[name].seed(number)


class GlobalGenerator(NamedTuple):
    """A global random generator. restore: takes what `state` returned."""

    seed: Callable[[int], Any]
    state: Callable[[], Any]
    restore: Callable[[Any], Any]


GENERATORS: Mapping[str, GlobalGenerator] = {
    "random": GlobalGenerator(random.seed, random.getstate, random.setstate),
    "numpy": GlobalGenerator(lambda number: np.random.seed(number % 2**32), np.random.get_state, np.random.set_state),
    # The generator itself: torch.manual_seed also queues a seed for CUDA, which takes 70 µs.
    "torch": GlobalGenerator(
        lambda number: torch.default_generator.manual_seed(number),
        torch.default_generator.get_state,
        lambda state: torch.default_generator.set_state(state),
    ),
}


def _same_state(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one[1], np.ndarray):  # numpy's state: a name, the keys, and numbers
        return bool(one[2:] == other[2:] and np.array_equal(one[1], other[1]))
    return bool(one == other)


# ----------------------------------------------------------------------------------------------------------------------
# samestep/job/orders.py

"""The orders of an epoch's rows that Job.order takes, besides a function of the job's own.
"""


@dataclass(frozen=True, eq=False)
class Weighted:
    """An epoch's order: rows drawn with replacement, by their weights, as torch's WeightedRandomSampler draws them.

    weights: of every sample, 0 or above. num_samples: rows of an epoch; None: as many as the dataset has.
    """

    weights: Sequence[float]
    num_samples: int | None = None

    def check(self, samples: int) -> None:
        _check_one_each("Weighted", "weights", self.weights, samples)
        if self.num_samples is not None and self.num_samples < 1:
            raise UserError(f"Weighted(num_samples={self.num_samples}): an epoch has 1 row or more")
        weights = self.weights.tolist() if hasattr(self.weights, "tolist") else self.weights
        if not min(weights) >= 0 or not 0 < sum(weights) < float("inf"):
            raise UserError("Weighted: the weights must be 0 or above, and some of them above 0")


@dataclass(frozen=True, eq=False)
class ByLength:
    """An epoch's order: batches of rows of like lengths, so that little is padded; every row once.

    lengths: of every sample. buckets: into so many parts of equal size the rows are sorted by length; within one they
    are shuffled, and so are the batches. The incomplete last batch has rows of any length.
    """

    lengths: Sequence[float]
    buckets: int = 10

    def check(self, samples: int) -> None:
        _check_one_each("ByLength", "lengths", self.lengths, samples)
        if self.buckets < 1:
            raise UserError(f"ByLength(buckets={self.buckets}): give 1 bucket or more")


@dataclass(frozen=True)
class Lanes:
    """An epoch's order: global_batch contiguous lanes, as the language models' `batchify` cuts a text.

    Row b of step s is sample b * S + s, where S = samples // global_batch: each row continues the one at its place in
    the step before, so that a state can be carried on (Job.carry_state). The same in every epoch. The incomplete last
    batch has the samples that are left over.
    """


def _check_one_each(what: str, field: str, values: Sequence[float], samples: int) -> None:
    if len(values) != samples:
        raise UserError(f"{what} has {len(values)} {field}, and the dataset {samples} samples; give one for each")


# ----------------------------------------------------------------------------------------------------------------------
# samestep/job/optimizer.py

"""Recipe, LRSchedule and Phase: how the optimizers of a job are built, and when their rates move.
"""


ParameterGroup = dict[str, Any]  # as torch.optim takes it


@dataclass(frozen=True)
class Recipe:
    """How to build the optimizer, which an engine that shards parameters does after sharding.

    cls: for example torch.optim.AdamW. settings: its keyword arguments, `lr` among them.
    groups: (model) -> torch's parameter groups (a list of dicts); None: one group of all parameters.
    """

    cls: type[Optimizer]
    settings: Mapping[str, Any] = field(default_factory=dict)
    groups: Callable[[nn.Module], list[ParameterGroup]] | None = None

    def build(self, model: nn.Module) -> Optimizer:
        """Builds the optimizer of `model`: the plain module, not a wrapper that renames its parameters."""
        parameters = self.groups(model) if self.groups else model.parameters()
        return self.cls(parameters, **self.settings)

    @property
    def needs_closure(self) -> bool:
        """Whether the optimizer's step demands a closure that computes the loss again, as LBFGS's does."""
        closure = inspect.signature(self.cls.step).parameters.get("closure")
        return closure is not None and closure.default is inspect.Parameter.empty


@dataclass(frozen=True)
class LRSchedule:
    """The learning-rate schedule: `make(optimizer)` returns a torch scheduler, stepped after every step or epoch.

    Of a job with phases every='step' means: after all phases have taken theirs.
    every='evaluation': stepped after every evaluation; ReduceLROnPlateau, which needs a metric, with that of the name
    `metric`.
    """

    make: Callable[[Optimizer], LRScheduler]
    every: Literal["step", "epoch", "evaluation"] = "step"
    metric: str = "loss"


@dataclass(frozen=True)
class Phase:
    """One of several optimizers of a job, such as the discriminator's of a GAN: see Job.phases.

    parameters: what the phase trains: the name of a module or parameter, such as 'generator', several names, or
        (model) -> parameters.
    criterion: (output, batch) -> scalar, the mean over the rows of the batch.
    forward: (model, batch) -> the output that the criterion is given; None: Job.forward.
    """

    name: str
    parameters: str | Sequence[str] | Callable[[nn.Module], Iterable[nn.Parameter]]
    criterion: Callable[[Any, Any], Tensor]
    optimizer: Recipe
    forward: Callable[[nn.Module, Any], Any] | None = None


# ----------------------------------------------------------------------------------------------------------------------
# samestep/tasks/eject/runtime/group.py

"""The start of a script that torchrun starts, one process for each device.
"""


class Ranks(World):
    """The processes of torch's process group."""

    def gather(self, value: Any) -> list[Any]:
        of_rank: list[Any] = [None] * self.size
        dist.all_gather_object(of_rank, value)
        return of_rank

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


@contextmanager
def process_group(world: World) -> Iterator[None]:
    """Joins the process group; inside another such block it joins nothing and leaves nothing."""
    if dist.is_initialized():
        yield
        return
    if world.device == "cpu":
        dist.init_process_group("gloo")
    else:
        torch.cuda.set_device(world.device)
        dist.init_process_group("nccl", device_id=torch.device(world.device))
    yield
    # No `finally`: after an error the others may never answer, and leaving the group could wait for them.
    dist.destroy_process_group()


def synced(job: Job, world: World) -> Job:
    """`job`, its BatchNorm layers made torch's SyncBatchNorm where it asks for that and there are other ranks."""
    if not job.sync_batchnorm or world.size == 1:
        return job
    return replace(job, model=lambda: nn.SyncBatchNorm.convert_sync_batchnorm(job.model()))


def start(
    job: Job,
    train: Callable[..., Any],
    close: Callable[[], None] | None = None,
    /,
    *,
    run: type[Run] = Run,
    **settings: Any,
) -> None:
    """Trains, saves and evaluates, as the rank that torchrun's environment names. Never returns."""
    if "RANK" not in os.environ:
        raise SystemExit(
            f"torchrun starts this script: python -m torch.distributed.run --nproc-per-node=2 {sys.argv[0]}"
        )
    rank, size, local_rank, local_size = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    world = Ranks(rank, size, local_size, (device,))
    torch.set_num_threads(1)
    with process_group(world):
        finish(job, train(synced(job, world), world, run(job, world), **settings), world)
    if close:
        close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads abort about one in three healthy processes in the interpreter's own exit


if __name__ == "__main__":
    start(job(), train)
