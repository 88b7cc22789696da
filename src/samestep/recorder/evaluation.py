"""Records which passes over DataLoaders are evaluated, and what is done with their results."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from samestep.rank.shards import digests
from samestep.recorder import collectives
from samestep.recorder.loaders import Loaders
from samestep.records.beside_steps import NO_LOADER, EvaluationSeen

STATISTICS = ("running_mean", "running_var")


class Evaluations:
    """Records the evaluations of one rank: forwards that are not training, of batches of a loader."""

    def __init__(self, loaders: Loaders) -> None:
        self._loaders = loaders
        self._seen: dict[int, EvaluationSeen] = {}  # by the number of the pass
        self._since: int | None = None  # the last collective before an evaluation that goes on

    def evaluated(self, module: nn.Module, step: int) -> None:
        """Is called after each forward of an outermost module that is not training."""
        latest = self._loaders.latest
        number = latest if latest is not None and not self._loaders.passes[latest].trained else NO_LOADER - step
        if number in self._seen:
            return
        statistics = _statistics(module)
        if number < 0 and not statistics:
            return
        if self._since is None:
            self._since = collectives.latest()
        self._seen[number] = EvaluationSeen(max(number, NO_LOADER), step, statistics)

    def trains(self) -> None:
        """Is called before each training forward: it ends what was evaluated before it."""
        if self._since is not None:
            called, self._since = collectives.since(self._since), None
            for number, each in self._seen.items():
                if not each.collectives:
                    self._seen[number] = replace(each, collectives=called or ["none"])

    def seen(self) -> list[EvaluationSeen]:
        """Returns the passes that were evaluated, without those whose batches are trained, too."""
        self.trains()
        passes = self._loaders.passes
        return [each for number, each in self._seen.items() if number < 0 or not passes[number].trained]


def _statistics(module: nn.Module) -> dict[str, int]:
    statistics = {name: b.detach() for name, b in module.named_buffers() if name.rpartition(".")[2] in STATISTICS}
    return dict(zip(statistics, digests(statistics)))
