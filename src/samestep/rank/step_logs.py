"""The listeners of a training: the job's on_step and on_evaluation, and the logs that --log names."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

from samestep.errors import UserError, printable
from samestep.job import Job, StepInfo
from samestep.rank.watch import Listener
from samestep.records.files import replace_text
from samestep.world.regular_files import open_new, read_regular


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
        for path in [each for name in ("steps.csv", "evaluations.csv") if (each := self.folder / name).exists()]:
            header, *lines = read_regular(path).decode().splitlines(keepends=True) or [""]
            kept = [line for line in lines if line.endswith("\n") and int(line.partition(",")[0]) <= step]
            if kept:  # else the first line that is written brings a header
                replace_text(path, header + "".join(kept))
                self.files[path.name] = open(path, "a", buffering=1, newline="")  # noqa: SIM115 - closed in close()

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

        self.open: Any = partial(SummaryWriter, str(folder / "tensorboard"))
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


# --log -> its class, whose name it is; the command's help and checks are in commands/train_options.py
LOGS: Mapping[str, Callable[[Path], Listener]] = {log.__name__.lower(): log for log in (Csv, TensorBoard, Wandb)}
