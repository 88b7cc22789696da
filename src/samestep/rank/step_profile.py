"""StepProfile: a trace of some steps of a training by torch's profiler, as --profile asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from samestep.errors import say
from samestep.message import message
from samestep.rank import hardware
from samestep.rank.parts import Part
from samestep.records.plan import TRACES
from samestep.world import World
from samestep.world.regular_files import make_folder, remove_file


class StepProfile(Part):
    """Profiles the optimizer steps `first` to `last`, counted from 1, of this rank.

    Its file in `folder` holds a range 'step N' for each of them, and nothing of the steps before and after. Evaluations
    and checkpoints between two of them are outside the ranges. Starting the profiler and writing the file count for no
    step. A step that is profiled is slower.
    """

    def __init__(self, world: World, folder: Path, steps: tuple[int, int]) -> None:
        self._world, self._steps = world, steps
        self._folder = folder / TRACES
        self._profile: Any = None  # while it runs
        self._range: Any = None
        self._seen: list[int] = []

    def step_begins(self) -> None:
        """Starts the profiler where the step is the first one to profile."""
        step = self.training.count.done + 1
        if not self._steps[0] <= step <= self._steps[1]:
            return
        if self._profile is None:
            gpus = [ProfilerActivity.CUDA] if self._world.device != "cpu" else []
            hardware.synchronize(self._world.device)
            self._profile = profile(activities=[ProfilerActivity.CPU, *gpus])
            self._profile.start()
            self.training.meter.resume()
        self._range = record_function(f"step {step}")
        self._range.__enter__()
        self._seen.append(step)

    def stepped(self) -> None:
        """Writes the trace after the last step to profile."""
        if self._range:
            self._range.__exit__(None, None, None)
            self._range = None
        if self._profile and self.training.count.done + 1 >= self._steps[1]:
            self.close()
            self.training.meter.resume()

    def close(self) -> None:
        """Writes the trace of the steps so far, where the training has ended before the last one to profile."""
        if self._profile is None:
            return
        if self._range:  # of a step that was not taken
            self._range.__exit__(None, None, None)
            self._range = None
        hardware.synchronize(self._world.device)
        self._profile.stop()
        running, self._profile = self._profile, None
        path = self._folder / f"steps{self._seen[0]}-{self._seen[-1]}-rank{self._world.rank}.json.gz"
        try:
            make_folder(self._folder)
            remove_file(path)
            running.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            say(message("trace_not_written", path=path, error=getattr(error, "message", str(error))))
