"""What people see in the terminal: live progress on stderr, tables on stdout."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from samestep.launch.rank_output import RankOutput, name
from samestep.records.inspection import EngineFacts
from samestep.records.record import Progress as Told
from samestep.records.results import ScoreResults, StudyResults, TrainResults

if TYPE_CHECKING:
    from typing_extensions import Self


class _Live:
    """A progress bar that is there while the block runs."""

    def __init__(self, *columns: TextColumn | MofNCompleteColumn) -> None:
        console = Console(stderr=True)
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            *columns,
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("asking the job", total=None)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.progress.disable:  # rich before 14.3 would print an empty line
            self.progress.stop()


class Launches(_Live):
    """Progress of a study, by launches."""

    def __init__(self) -> None:
        super().__init__(MofNCompleteColumn(), TextColumn("launches"))

    def tell(self, phase: str, done: int, total: int) -> None:
        self.progress.update(self.task, description=phase, completed=done, total=total)


class Training(_Live):
    """Progress of a training, by steps, and what its ranks print: equal lines of many ranks once."""

    SAYS_EVERY_S = 30.0  # where there is no terminal, and so no bar
    COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")

    def __init__(self, title: str, folder: Path, *, first: bool = True) -> None:
        """first: whether this command is the one that speaks for all ranks."""
        super().__init__(MofNCompleteColumn(), TextColumn("steps  {task.fields[facts]}"))
        self.title = title
        self.lines = RankOutput(folder, self._line)
        self.phase: str | None = "" if first else None
        self.attempt = self.evaluated = 0
        self.said_at = time.monotonic()
        self.progress.update(self.task, facts="")

    def tell(self, told: Told) -> None:
        self.lines.look()
        if told.attempt != self.attempt:
            self.attempt, self.evaluated = told.attempt, 0
            self._event(f"a rank has died, and torchrun has started all again (restart {self.attempt})")
        phase = told.phase
        if self.phase is not None and phase != self.phase:
            self.phase = phase
            self._event(PHASES.get(phase, phase))
        self.progress.update(self.task, description=f"{self.title}: {phase}")
        for entry in told.curve[self.evaluated :]:
            self.evaluated += 1
            if self.phase is not None:
                self._event(f"after step {entry['step']:.0f}: {_means(entry)}")
        if told.done is not None:
            facts = f"{told.samples:,} samples  loss {told.loss:.4f}"
            self.progress.update(self.task, completed=told.done, total=told.steps, facts=facts)
            late = time.monotonic() - self.said_at > self.SAYS_EVERY_S
            if self.phase is not None and self.progress.disable and late:
                self.said_at = time.monotonic()
                self._event(f"step {told.done} of {told.steps}  {facts}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # after a failure its one sentence says where the logs are
            self.lines.look(last=True)
        super().__exit__(kind, error, trace)

    def _event(self, sentence: str) -> None:
        line = f"samestep: {self.title}: {sentence}"
        self.progress.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _line(self, ranks: list[int], text: str) -> None:
        prefix = Text(f"[{name(ranks)}] ", style=self.COLORS[ranks[0] % len(self.COLORS)])
        self.progress.console.print(prefix + Text.from_ansi(text), soft_wrap=True)  # colours; nothing that moves


PHASES = {"starting": "starting the ranks", "train": "training", "evaluate": "evaluation"}


def _console() -> Console:
    """stdout; where it is no terminal (a file, a log), wide enough for whole tables."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=120)


def show_study(results: StudyResults) -> None:
    """Prints the table of a study, its notes and where the report is."""
    from samestep import report

    console = _console()
    console.print(report.table(results))
    for note in report.notes(results):
        console.print(f"  {note}", markup=False, highlight=False)
    console.print(f"report: {results.report}", markup=False, highlight=False, soft_wrap=True)


def show_training(results: TrainResults) -> None:
    """Prints what a training came to."""
    if results.stopped:
        why = "as asked" if results.stopped == "asked" else "because the evaluations get no better"
        print(f"stopped after step {results.steps} of {results.asked_steps}, {why}")
    ranks, steps = (
        f"{n} {what}{'' if n == 1 else 's'}" for n, what in ((results.world_size, "rank"), (results.steps, "step"))
    )
    loss = "none" if results.final_loss is None else f"{results.final_loss:.4f}"
    print(f"{results.engine} on {ranks}: {steps} in {results.seconds:.1f} s, final loss {loss}")
    if results.evaluation:
        print(f"evaluation over {results.evaluation_rows} rows, each once: {_means(results.evaluation)}")
    if results.advice:
        print(f"waited for data in {results.wait_share:.0%} of the time: {results.advice}")
    print(f"weights: {results.weights}, of step {results.weights_of_step}")


def show_scores(results: ScoreResults) -> None:
    """Prints what weights come to."""
    print(f"evaluation over {results.evaluation_rows} rows, each once: {_means(results.evaluation)}")
    if results.predictions:
        print(f"predictions: {results.predictions}")


def _means(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items() if name != "step")


def show_engines(engines: Sequence[EngineFacts]) -> None:
    """Prints what runs here."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("engine", "runs here", "version", "what for", "to install"):
        table.add_column(column)
    for facts in engines:
        state = "yes" if facts.available else f"no: {facts.reason}"
        cells = (facts.name, state, facts.version or "", facts.purpose, facts.install or "")
        table.add_row(*map(Text, cells))  # Text: rich would read [accelerate] as its markup
    _console().print(table)
