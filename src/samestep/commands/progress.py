"""Prints to the terminal: live progress on stderr, tables on stdout."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from samestep.errors import LONGEST_LINE, SAID_BY, message_in, printable, say
from samestep.launch.rank_logs import RankOutput, name
from samestep.message import Message, as_said, message
from samestep.records.collectives import CollectiveResults
from samestep.records.files import why_not_writable
from samestep.records.inspection import EngineFacts
from samestep.records.record import Progress as RankProgress
from samestep.records.results import CompareResults
from samestep.records.run_results import EvaluateResults, RunResults
from samestep.records.runs import PastRun
from samestep.records.spot_check import SpotCheck
from samestep.report import language
from samestep.report.terminal import Terminal, cell, terminal

if TYPE_CHECKING:
    from typing_extensions import Self


class _Live:
    """A progress bar that is shown while the block runs."""

    PRINT_EVERY_S = 30.0  # where there is no terminal, and so no bar

    def __init__(self, *columns: ProgressColumn) -> None:
        console = self.console = Terminal(stderr=True)
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            *columns,
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("inspecting the job", total=None)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.progress.disable:  # rich before 14.3 would print an empty line
            self.progress.stop()


class Launches(_Live):
    """The progress bar of a comparison: its launches."""

    def __init__(self) -> None:
        super().__init__(MofNCompleteColumn(), TextColumn("launches"))
        self.printed_at = time.monotonic()

    def show(self, phase: str, done: int, total: int) -> None:
        """Shows a phase and how many launches are done; without a terminal, a line now and then."""
        if self.progress.disable and time.monotonic() - self.printed_at > self.PRINT_EVERY_S:
            self.printed_at = time.monotonic()
            say(message("launch_goes_on", launch=phase, number=min(done + 1, total), launches=total))
        self.progress.update(self.task, description=phase, completed=done, total=total)


class Training(_Live):
    """The progress bar of a training, its steps, and the output of its ranks: equal lines of several ranks once."""

    PROBE_EVERY_S = 3.0  # whether the folder still takes files
    COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")

    def __init__(self, title: str, folder: Path, launcher: str, *, first: bool = True) -> None:
        """Begins an empty bar.

        launcher: it restarts the ranks. first: whether this command prints the events: only rank 0's does where an
        outer launcher has started it.
        """
        super().__init__(MofNCompleteColumn(), TextColumn("steps  {task.fields[facts]}", markup=False))
        self.title, self.folder, self.launcher = title, folder, launcher
        self.lines = RankOutput(folder, self._line)
        self.phase: str | None = "" if first else None
        self.attempt = self.evaluated = self.ranks = 0
        self.printed_at = self.probed_at = time.monotonic()
        self.writable = True
        self.eta = TimeLeft()
        self.progress.update(self.task, facts="")

    def show(self, now: RankProgress) -> None:
        """Prints the ranks' new output and events, and updates the bar."""
        self.lines.print_new()
        self._probe()
        if now.attempt != self.attempt:
            self.attempt, self.evaluated = now.attempt, 0
            restart = {"launcher": self.launcher, "restart": self.attempt}
            if self.ranks and now.ranks not in (0, self.ranks):
                self._event(message("machines_have_left_or_joined", ranks=now.ranks, before=self.ranks, **restart))
            else:
                self._event(message("rank_died_and_all_were_restarted", **restart))
        self.ranks = now.ranks or self.ranks
        phase = now.activity
        if self.phase is not None and phase != self.phase:
            self.phase = phase
            self._event(Message(ACTIVITIES[phase]) if phase in ACTIVITIES else as_said(phase))
        activity = str(Message(ACTIVITIES[phase])) if phase in ACTIVITIES else phase
        self.progress.update(self.task, description=f"{self.title}: {activity}")
        for entry in now.curve[self.evaluated :]:
            self.evaluated += 1
            if self.phase is not None and entry["step"] > now.resumed_from:
                self._event(message("evaluated_after_step", step=entry["step"], means=_means(entry)))
        if now.done is not None:
            left = self.eta.after(now.done, now.steps, time.monotonic())
            facts = f"{now.samples:,} samples  loss {now.loss:.4f}" + (f"  {left} left" if left else "")
            self.progress.update(self.task, completed=now.done, total=now.steps, facts=facts)
            due = time.monotonic() - self.printed_at > self.PRINT_EVERY_S
            if self.phase is not None and self.progress.disable and due:
                self.printed_at = time.monotonic()
                self._event(message("step_taken", step=now.done, steps=now.steps, facts=facts))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # after a failure, the error's sentence names the logs
            self.lines.print_new(last=True)
        super().__exit__(kind, error, trace)

    def _probe(self) -> None:
        """Says once that the folder takes no files any more. The ranks cannot: their logs are in it."""
        if self.writable and time.monotonic() - self.probed_at > self.PROBE_EVERY_S:
            self.probed_at = time.monotonic()
            if why := why_not_writable(self.folder):
                self.writable = False
                self._event(message("progress_cannot_be_written", folder=self.folder, why=why))

    def _event(self, said: Message) -> None:
        self.console.show_line(f"samestep: {self.title}: {language.text(said)}")

    def _line(self, ranks: list[int], text: str) -> None:
        if text.startswith(SAID_BY) and (said := message_in(text.removeprefix(SAID_BY))):
            text = printable(f"{SAID_BY}{language.text(said)}")
        prefix = Text(f"[{name(ranks)}] ", style=self.COLORS[ranks[0] % len(self.COLORS)])
        text = text if len(text) <= LONGEST_LINE else f"{text[:LONGEST_LINE]}…"
        self.console.print(prefix + Text.from_ansi(text), soft_wrap=True)  # keeps colours, drops cursor movements


BUILT_IN = "digits"  # the default job, after which a user goes on with a job of their own
ACTIVITIES = {"starting": "ranks_are_started", "run": "training_goes_on", "evaluate": "evaluation_goes_on"}


def show_comparison(results: CompareResults, *, explain: bool = False) -> None:
    """Prints the table of a comparison, its notes and the report's path. explain: also each fault that was tried for a
    difference."""
    from samestep import report

    console = terminal(100)
    console.print(report.table(results))
    if costs := report.costs(results):
        console.print()
        console.print(costs)
        console.print()
    for line in report.footer(results):
        # A line with a command is pasted: the terminal may wrap it, a line's end in it may not.
        console.print(cell(line), soft_wrap="install" in line)
    for line in report.trials(results) if explain else ():
        console.print(cell(line))
    console.show_line(language.text(message("report_written", file=results.report)))
    if results.job == BUILT_IN:
        console.show_line(language.text(message("next_is_your_own_job")))


def show_training(results: RunResults) -> None:
    """Prints the results of a training."""
    if results.stopped:
        requested = results.stopped == "requested"
        why = message("stopped_on_request" if requested else "stopped_without_improvement")
        _print(message("training_stopped_early", step=results.steps, steps=results.asked_steps, why=why))
    _print(
        message(
            "training_has_taken_steps",
            engine=results.engine,
            ranks=results.world_size,
            steps=results.steps - results.resumed_from,
            seconds=results.seconds,
            earlier=results.resumed_from or None,
            loss=None if results.final_loss is None else f"{results.final_loss:.4f}",
        )
    )
    if results.evaluation:
        _print_evaluation(results.evaluation_rows, results.evaluation)
    if results.skipped_steps:
        _print(message("steps_were_skipped", steps=results.skipped_steps))
    if results.spot_checks:
        _print(_spot_checks(results.spot_checks))
    if results.advice:
        _print(message("training_waited_for_data", share=results.wait_share, advice=results.advice))
    _print(message("weights_written", file=results.weights, step=results.weights_of_step))
    if results.export:
        _print(message("export_written", folder=results.export))
    if results.monitor:
        _print(message("resource_usage_written", file=results.monitor))
    for trace in results.traces:
        _print(message("trace_written", file=trace))


def _spot_checks(checks: Sequence[SpotCheck]) -> Message:
    """Returns a message about the steps that were replayed."""
    steps: dict[str, list[int]] = {"same": [], "differs": [], "unknown": []}
    for check in checks:
        steps[check.verdict].append(check.step)
    unknown, differ = len(steps["unknown"]) or None, steps["differs"]
    if not steps["same"] and not differ:
        return message("no_step_was_spot_checked", unknown=unknown)
    return message(
        "steps_were_spot_checked", same=len(steps["same"]), differ=len(differ) or None, steps=differ, unknown=unknown
    )


def show_evaluation(results: EvaluateResults) -> None:
    """Prints the results of an evaluation."""
    _print_evaluation(results.evaluation_rows, results.evaluation)
    if results.predictions:
        _print(message("predictions_written", file=results.predictions))


def _print(said: Message) -> None:
    print(printable(language.text(said)))


def _print_evaluation(rows: int, means: Mapping[str, float]) -> None:
    _print(message("rows_were_evaluated", rows=rows, means=_means(means)))


def _means(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items() if name != "step")


def show_runs(runs: Sequence[PastRun]) -> None:
    """Prints the table of past runs, and below it why each ended early and the line that continues or repeats it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("folder", "command", "on", "outcome", "steps", "evaluation"):
        table.add_column(column, overflow="fold")
    for run in runs:
        on = (
            ",".join(run.engines[:2])
            + (" …" if len(run.engines) > 2 else "")
            + (f" × {run.ranks}" if run.ranks else "")
        )
        steps = "" if run.steps is None else f"{run.steps}/{run.asked_steps or '?'}"
        cells = (Path(run.folder).name, f"{run.command} {Path(run.job).name}", on, run.outcome, steps)
        table.add_row(*map(cell, cells), cell(_means(run.evaluation) if run.evaluation else ""))
    console = terminal(100)
    console.print(table)
    for run in runs:
        lines = [str(run.reason)] if run.reason else []
        lines += [str(message("newest_checkpoint", folder=run.checkpoint))] if run.checkpoint else []
        if run.line:
            lines.append(str(message("line_that_continues" if run.continues else "line_that_repeats", line=run.line)))
        for line in ["", Path(run.folder).name, *(f"  {line}" for line in lines)] if lines else []:
            console.show_line(line)


def show_engines(engines: Sequence[EngineFacts]) -> None:
    """Prints the table of engines: which run on this machine; and below it the lines that install them, each whole."""
    console = terminal(100)
    table = Table(box=None, pad_edge=False, header_style="bold")
    wide = console.width >= 60
    for column in ("engine", "runs here", *(["version"] if wide else []), "what for"):
        table.add_column(column, overflow="fold", no_wrap=column in ("engine", "version"))
    commands: dict[str, list[str]] = {}
    for facts in engines:
        state = "yes" if facts.available else f"no: {facts.reason}"
        cells = (facts.name, state, *([facts.version or ""] if wide else []), facts.purpose)
        table.add_row(*map(cell, cells))
        if facts.install:
            commands.setdefault(facts.install, []).append(facts.name)
    console.print(table)
    console.print("\nto install:", style="bold")
    for command, names in commands.items():
        console.print(cell(f"  # {', '.join(names)}"), style="dim", soft_wrap=True)
        console.print(cell(f"  {command}"), soft_wrap=True)


def show_collectives(results: CollectiveResults) -> None:
    """Prints what was checked, and the table of times."""
    from samestep.report import collective_text

    console = terminal(collective_text.WIDTH)
    for sentence in collective_text.sentences(results):
        console.print(cell(sentence))
    if results.curves:
        console.print()
        console.print(collective_text.table(results))


class TimeLeft:
    """Estimates the rest of a training from the time of its steps so far, evaluations included."""

    def __init__(self) -> None:
        self.first: tuple[int, float] | None = None  # steps done, and when

    def after(self, done: int, steps: int, now: float) -> str:
        """Returns the time left as '0:01:30'; '' before it can be estimated. now: in seconds, of any clock."""
        if self.first is None or done < self.first[0]:  # the ranks were restarted
            self.first = (done, now)
        first, began = self.first
        if done == first:
            return ""
        return str(timedelta(seconds=round((now - began) / (done - first) * (steps - done))))
