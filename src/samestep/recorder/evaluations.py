"""Records which passes over DataLoaders are evaluated, and the collectives of this process.

Collectives are read from torch's flight recorder, which sees those of C++ (DistributedDataParallel's), too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from samestep.job.foreign import named_buffers_in
from samestep.rank import flight_recorder
from samestep.rank.digests import digests
from samestep.recorder.loaders import Loaders, rows_of
from samestep.records.flight_recorder import Entry
from samestep.records.script import NO_LOADER, EvaluationRecord, GroupRecord

ENTRIES = 20_000  # how many collectives torch keeps
ROWS = 1024  # how many rows of an evaluation without a loader are noted
STATISTICS = ("running_mean", "running_var")


def process_groups() -> dict[str, GroupRecord]:
    """Returns the collectives of each process group, by its name."""
    groups: dict[str, GroupRecord] = {}
    members = _members()
    for entry in _collectives():
        if entry.group not in groups:
            groups[entry.group] = GroupRecord(members.get(entry.group, []), [], entry.collective_seq_id)
        groups[entry.group].calls.append(_call(entry))
    return groups


def _collectives() -> list[Entry]:
    """Returns the collectives that torch has recorded, in their order; none where it records none."""
    return [entry for entry in flight_recorder.read() if not entry.is_p2p]


def _members() -> dict[str, list[int]]:
    if not dist.is_available() or not dist.is_initialized():
        return {}
    world = dist.distributed_c10d._world
    # In place of a group that this rank is not in, torch has a mark without a name.
    named = [(world.pg_names[group], ranks) for group, ranks in world.pg_group_ranks.items() if group in world.pg_names]
    return {str(name): sorted(ranks) for name, ranks in named}


def _call(entry: Entry) -> str:
    shapes = " ".join(str([*shape]) for shape in entry.input_sizes)
    types = " ".join(dict.fromkeys(dtype.lower() for dtype in entry.input_dtypes))
    return " ".join(filter(None, [entry.operation, shapes, types]))


class Evaluations:
    """Records the evaluations of one rank: forwards that are not training, of batches of a loader."""

    def __init__(self, loaders: Loaders) -> None:
        self._loaders = loaders
        self._records: dict[int, EvaluationRecord] = {}  # by the number of the pass
        self._since: int | None = None  # the last collective before an evaluation that goes on

    def evaluated(self, module: nn.Module, step: int, inputs: Any, with_loss: bool) -> None:
        """Notes the forward pass of an outermost module that is not training. Called after each one."""
        latest = self._loaders.latest
        self._loaders.evaluated()
        number = latest if latest is not None and not self._loaders.passes[latest].trained else NO_LOADER - step
        rows = rows_of(inputs) if number < 0 else []
        if record := self._records.get(number):
            if rows and len(record.rows) < ROWS:
                self._records[number] = replace(record, rows=[*record.rows, *rows])
            return
        statistics = _statistics(module)
        if number < 0 and not statistics and not rows:
            return
        is_judged = number >= 0 or bool(statistics) or with_loss
        if is_judged and self._since is None:
            self._since = max((entry.record_id for entry in _collectives()), default=-1)
        self._records[number] = EvaluationRecord(
            max(number, NO_LOADER), step, statistics, rows=rows, with_loss=with_loss
        )

    def trains(self) -> None:
        """Ends the evaluation before a training forward. Called before each one."""
        if self._since is None:
            return
        called = [entry.operation for entry in _collectives() if entry.record_id > self._since] or ["none"]
        self._since = None
        for number, record in self._records.items():
            if not record.collectives:
                self._records[number] = replace(record, collectives=called)

    def forget(self) -> None:
        """Forgets the evaluations so far."""
        self._records, self._since = {}, None

    def records(self) -> list[EvaluationRecord]:
        """Returns the passes that were evaluated, without those whose batches are trained, too."""
        self.trains()
        passes = self._loaders.passes
        return [record for number, record in self._records.items() if number < 0 or not passes[number].trained]


def _statistics(module: nn.Module) -> dict[str, int]:
    """Returns the digests of a model's BatchNorm statistics."""
    statistics = {name: b.detach() for name, b in named_buffers_in(module) if name.rpartition(".")[2] in STATISTICS}
    return dict(zip(statistics, digests(statistics)))
