"""Profiles chosen optimizer steps with torch.profiler, and writes a trace that Perfetto and Chrome show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from samestep.errors import say
from samestep.rank.meter import Meter
from samestep.records.plan import TRACES
from samestep.world import World


class StepProfile:
    """Profiles the optimizer steps `first` to `last`, counted from 1, of this rank; without `steps`, none.

    Its file in `folder` holds a range 'step N' for each of them, and nothing of the steps before and after. Evaluations
    and checkpoints between two of them are outside the ranges. Starting the profiler and writing the file count for no
    step. A step that is profiled is slower.
    """

    def __init__(self, world: World, folder: Path = Path(), steps: tuple[int, int] | None = None) -> None:
        self._world, self._steps = world, steps
        self._folder = folder / TRACES
        self._profile: Any = None  # while it runs
        self._range: Any = None
        self._seen: list[int] = []

    def begin(self, done: int, meter: Meter) -> None:
        """Notes that the step after `done` steps begins. Starts the profiler where that is the first one to profile."""
        if self._steps is None or not self._steps[0] <= done + 1 <= self._steps[1]:
            return
        if self._profile is None:
            gpus = [ProfilerActivity.CUDA] if self._world.device != "cpu" else []
            self._synchronize()
            self._profile = profile(activities=[ProfilerActivity.CPU, *gpus])
            self._profile.start()
            meter.resume()
        self._range = record_function(f"step {done + 1}")
        self._range.__enter__()
        self._seen.append(done + 1)

    def end(self, done: int, meter: Meter) -> None:
        """Notes that step `done` has ended. Writes the trace after the last one to profile."""
        if self._range:
            self._range.__exit__(None, None, None)
            self._range = None
        if self._profile and self._steps and done >= self._steps[1]:
            self.close()
            meter.resume()

    def close(self) -> None:
        """Writes the trace of the steps so far, where the training has ended before the last one to profile."""
        if self._profile is None:
            return
        if self._range:  # of a step that was not taken
            self._range.__exit__(None, None, None)
            self._range = None
        self._synchronize()
        self._profile.stop()
        running, self._profile = self._profile, None
        path = self._folder / f"steps{self._seen[0]}-{self._seen[-1]}-rank{self._world.rank}.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            say(f"the trace {path} cannot be written ({error}); the training goes on")

    def _synchronize(self) -> None:
        if self._world.device != "cpu":
            torch.cuda.synchronize(self._world.device)
