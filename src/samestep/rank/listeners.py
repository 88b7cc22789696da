"""The listeners of a training, on rank 0: the job's on_step and on_evaluation, and the logs that --log names."""

from __future__ import annotations

import csv
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

from torch.optim import Optimizer

from samestep.errors import UserError, printable, say
from samestep.job import Job, StepInfo
from samestep.message import message
from samestep.rank.meter import Meter
from samestep.rank.parts import Part
from samestep.records.files import replace_text
from samestep.world.regular_files import make_folder, open_end, open_new, read_regular


class Listener(Protocol):
    """Is called after each step and evaluation. name: for the warning where it raises. resume: called first where the
    training continues after `step` steps: what was reported of later ones no longer counts."""

    name: str

    def resume(self, step: int) -> None: ...

    def step(self, info: StepInfo) -> None: ...

    def evaluation(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class _Pending:
    """A step whose loss is still on its way from the device."""

    step: int
    epoch: int
    rates: tuple[float, ...]
    seconds: float
    wait_s: float


class Listeners(Part):
    """Collects what a StepInfo holds, without a synchronisation: listeners are called once its loss has been read.

    rows_of: (steps) -> the rows of the first so many steps, over all ranks.
    """

    def __init__(self, listeners: Sequence[Listener], rows_of: Callable[[int], int]) -> None:
        self.listeners, self.rows_of = listeners, rows_of
        self._rates: tuple[float, ...] = ()
        self._pending: list[_Pending] = []
        self._read = 0  # losses of micro-batches that listeners have received
        self._began = time.perf_counter()
        self._warned: set[str] = set()

    def begin(self) -> None:
        """Registers the optimizer whose learning rates are reported, and starts the clock."""
        first = self.training.count.first
        for listener in self.listeners if first else ():
            self._call(listener.name, listener.resume, first)
        # Read after the optimizer's step: later, the scheduler has moved the rate.
        self.training.optimizer.register_step_post_hook(lambda stepped, *_: self._read_rates(stepped))
        self._began = time.perf_counter()

    def _read_rates(self, optimizer: Optimizer) -> None:
        self._rates = tuple(float(group["lr"]) for group in optimizer.param_groups)

    def counted(self) -> None:
        """Notes the step that has just been taken, and reports those whose losses have been read."""
        if self.training.micro_batch:
            self.step(self.training.count.done, self.training.micro_batch.epoch, self.training.meter)

    def step(self, done: int, epoch: int, meter: Meter) -> None:
        """Notes a step, and reports those whose losses have been read."""
        now = time.perf_counter()
        self._pending.append(_Pending(done, epoch, self._rates, now - self._began, meter.wait_s[-1]))
        self._began = now
        self.report(meter)

    def pause(self, meter: Meter) -> None:
        """Reports all steps so far, before an evaluation."""
        meter.flush()
        self.report(meter)

    def report(self, meter: Meter) -> None:
        """Reports the steps whose losses have been read."""
        while self._pending:
            pending = self._pending[0]
            until = self._read
            while until < len(meter.step_of) and meter.step_of[until] < pending.step:
                until += 1
            if until > len(meter.losses):
                return
            weights, losses = meter.weight_of[self._read : until], meter.losses[self._read : until]
            total = sum(weights)
            loss = sum(w * x for w, x in zip(weights, losses)) / total if total else 0.0
            rows = self.rows_of(pending.step) - self.rows_of(pending.step - 1)
            info = StepInfo(
                step=pending.step,
                epoch=pending.epoch,
                loss=loss,
                rates=pending.rates,
                rows=rows,
                seconds=pending.seconds,
                wait_s=pending.wait_s,
            )
            self._read = until
            del self._pending[0]
            for listener in self.listeners:
                self._call(listener.name, listener.step, info)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Reports an evaluation after `step` steps. The time until now counts for no step."""
        for listener in self.listeners:
            self._call(listener.name, listener.evaluation, step, dict(metrics))
        self._began = time.perf_counter()

    def close(self) -> None:
        for listener in self.listeners:
            self._call(listener.name, listener.close)

    def _call(self, name: str, function: Callable[..., Any], *given: Any) -> None:
        try:
            function(*given)
        except Exception as error:
            if name not in self._warned:  # told once: the log may fail at every step
                self._warned.add(name)
                frame = traceback.extract_tb(error.__traceback__)[-1]
                what = (str(error).strip().splitlines() or [""])[0]
                raised = f"{type(error).__name__}: {what}"
                say(message("listener_raised", listener=name, error=raised, line=f"{frame.filename}:{frame.lineno}"))


Progress = Callable[[int, float], None]  # (steps done, a recent loss)


class ProgressReport(Part):
    """Calls `progress` at most twice a second."""

    EVERY_S = 0.5

    def __init__(self, progress: Progress) -> None:
        self._progress, self._called_at = progress, time.monotonic()

    def counted(self) -> None:
        """Reports how many steps are done, and a recent loss."""
        if time.monotonic() - self._called_at > self.EVERY_S:
            self._called_at = time.monotonic()
            self._progress(self.training.count.done, self.training.meter.recent_loss())


def listeners_of(job: Job, logs: Iterable[str], folder: Path) -> list[Listener]:
    """Returns the listeners of a training. logs: of LOGS. folder: for their files."""
    listeners: list[Listener] = []
    if job.on_step:
        listeners.append(Called("on_step", step=job.on_step))
    if job.on_evaluation:
        listeners.append(Called("on_evaluation", evaluation=job.on_evaluation))
    return [*listeners, *(_opened(name, folder) for name in logs)]


def _opened(name: str, folder: Path) -> Listener:
    try:
        return LOGS[name](folder)
    except Exception as error:
        what = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"--log {name} cannot start ({type(error).__name__}: {what}); fix that, or leave it out"
        ) from error


def scalars(info: StepInfo) -> dict[str, float]:
    """Returns what is logged of a step: loss, lr (lr_0, lr_1, … for several groups), samples_per_second, wait_s."""
    names = ["lr"] if len(info.rates) == 1 else [f"lr_{number}" for number in range(len(info.rates))]
    rates = dict(zip(names, info.rates))
    return {"loss": info.loss, **rates, "samples_per_second": info.samples_per_second, "wait_s": info.wait_s}


class Called:
    """Calls a function of the job's. name: the Job's field."""

    def __init__(
        self,
        name: str,
        *,
        step: Callable[[StepInfo], None] = lambda _: None,
        evaluation: Callable[[int, dict[str, float]], None] = lambda *_: None,
    ) -> None:
        self.name, self.step, self.evaluation = name, step, evaluation

    def resume(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class Csv:
    """steps.csv, a line for each step, and evaluations.csv, a line for each evaluation."""

    name = "--log csv"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, IO[str]] = {}

    def resume(self, step: int) -> None:
        """Continues the files: keeps their lines until `step`."""
        for path in [
            existing for name in ("steps.csv", "evaluations.csv") if (existing := self.folder / name).exists()
        ]:
            header, *lines = read_regular(path).decode().splitlines(keepends=True) or [""]
            lines = [line for line in lines if line.endswith("\n") and int(line.partition(",")[0]) <= step]
            if lines:  # otherwise the first line that is written has a header
                replace_text(path, header + "".join(lines))
                self.files[path.name] = open_end(path, text=True, buffering=1)

    def step(self, info: StepInfo) -> None:
        self._write("steps.csv", {"step": info.step, "epoch": info.epoch, **scalars(info)})

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self._write("evaluations.csv", {"step": step, **metrics})

    def _write(self, name: str, line: Mapping[str, float]) -> None:
        if name not in self.files:
            self.files[name] = open_new(self.folder / name, text=True, buffering=1)
            csv.writer(self.files[name]).writerow(map(heading, line))
        csv.writer(self.files[name]).writerow(line.values())

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def heading(name: str) -> str:
    """Returns a metric's name as a cell that no spreadsheet takes for a formula."""
    return f"'{printable(name)}" if name.startswith(("=", "+", "-", "@")) else printable(name)


class TensorBoard:
    """Event files in the folder tensorboard/, with torch's own writer."""

    name = "--log tensorboard"

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.open: Any = partial(SummaryWriter, str(make_folder(folder / "tensorboard")))
        self.writer: Any = self.open()

    def resume(self, step: int) -> None:
        self.writer.close()
        self.writer = self.open(purge_step=step + 1)

    def step(self, info: StepInfo) -> None:
        for name, value in scalars(info).items():
            self.writer.add_scalar(f"train/{name}", value, info.step)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(f"evaluation/{name}", value, step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """A run of Weights & Biases in the folder wandb/, offline: nothing is sent; `wandb sync` sends it later."""

    name = "--log wandb"

    def __init__(self, folder: Path) -> None:
        import wandb

        make_folder(folder / "wandb")
        self.run: Any = wandb.init(mode="offline", dir=str(folder), project="samestep", name=folder.name)
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def resume(self, step: int) -> None:
        pass  # a run of its own, which begins after that step

    def step(self, info: StepInfo) -> None:
        self.run.log({"step": info.step, **{f"train/{name}": value for name, value in scalars(info).items()}})

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log({"step": step, **{f"evaluation/{name}": value for name, value in metrics.items()}})

    def close(self) -> None:
        self.run.finish()


# --log -> its class, whose name it is; the command's help and checks are in commands/training_options.py
LOGS: Mapping[str, Callable[[Path], Listener]] = {log.__name__.lower(): log for log in (Csv, TensorBoard, Wandb)}
