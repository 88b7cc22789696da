"""Records the numbers that a script reports of an evaluation: what it prints, logs, or gives to a plateau's schedule.

An evaluation begins with a forward pass that is no training, and lasts until the next training forward. Also recorded
are the few numbers that a rank hands to the others meanwhile: a value that is wrong is often made of these.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from samestep.job.foreign import is_a
from samestep.rank.hooks import Hooks
from samestep.recorder.call_sites import CallSites, Chain
from samestep.recorder.random_numbers import torch_state
from samestep.records.call_site import CallSite
from samestep.records.reports import NUMBER, ReportCall, ReportRecord
from samestep.records.torch_collectives import COLLECTIVES

MOST_REPORTS, MOST_NUMBERS = 400, 32  # of one rank, and of one report
MOST_ELEMENTS = 16  # of a tensor that is shown or handed to other ranks as a few numbers
LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
CONNECTOR = "trainer.connectors.logger_connector.logger_connector"


class Reports:
    """Records what is reported between `begin` and `end`. steps_done: returns the optimizer steps taken so far."""

    def __init__(self, sites: CallSites, steps_done: Callable[[], int]) -> None:
        self._sites, self._steps_done = sites, steps_done
        self._records: list[ReportRecord] = []
        self._evaluates = self._draws = False
        self._lines_of_names: dict[str, Chain] = {}  # of what Lightning reports after the evaluation
        self._state = ""  # digest of torch's random state where a forward pass of the evaluation begins

    def attach(self, hooks: Hooks) -> None:
        """Patches what prints, logs, decides, and what hands numbers to other ranks."""
        hooks.attach(builtins, "print", self._print)
        hooks.attach(logging.Logger, "handle", self._log)
        hooks.attach(ReduceLROnPlateau, "step", self._decide)
        for function in COLLECTIVES:
            if function.kind in ("reduce", "gather") and hasattr(dist, function.name):
                signature = inspect.signature(getattr(dist, function.name))
                hooks.attach(dist, function.name, functools.partial(self._hand_on, signature, function.sent))
        later = hooks.attach_after_import
        later("transformers.trainer", "Trainer", "log", self._log_of_trainer)
        later("torch.utils.tensorboard.writer", "SummaryWriter", "add_scalar", self._add_scalar)
        for package in LIGHTNING:
            later(f"{package}.core.module", "LightningModule", "log", self._name_line)
            later(f"{package}.{CONNECTOR}", "_LoggerConnector", "log_eval_end_metrics", self._log_of_lightning)

    def begin_forward(self) -> None:
        """Begins an evaluation, or goes on with it, by a forward pass that is no training."""
        self._evaluates = True
        self._state = torch_state()

    def end_forward(self) -> None:
        """Notes whether the forward pass has drawn random numbers."""
        self._draws |= self._state != torch_state()

    def end(self) -> None:
        """Ends the evaluation, before a training forward."""
        self._evaluates = self._draws = False

    def forget(self) -> None:
        """Forgets what was reported so far."""
        self._records = []
        self.end()

    def records(self) -> list[ReportRecord]:
        """Returns the reports, in their order."""
        return [*self._records]

    def _print(self, print_: Any, *args: Any, **kwargs: Any) -> Any:
        if self._evaluates:
            self._add_text("print", " ".join(_shown(arg) for arg in args))
        return print_(*args, **kwargs)

    def _log(self, handle: Any, logger: Any, record: Any) -> Any:
        if self._evaluates:
            with suppress(Exception):  # of a format that does not fit: logging itself says so
                self._add_text("log", record.getMessage())
        return handle(logger, record)

    def _decide(self, step: Any, schedule: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
        if self._evaluates:
            self._add_values("plateau", {"metrics": metrics})
        return step(schedule, metrics, *args, **kwargs)

    def _log_of_lightning(self, log: Any, connector: Any, metrics: Any) -> Any:
        if self._evaluates and not connector.trainer.sanity_checking:
            for name, value in metrics.items():
                self._add_values("metric", {name: value}, self._lines_of_names.get(name.removesuffix("_epoch"), ()))
        return log(connector, metrics)

    def _name_line(self, log: Any, module: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        if self._evaluates:
            self._lines_of_names[str(name)] = self._sites.chain()
        return log(module, name, *args, **kwargs)

    def _log_of_trainer(self, log: Any, trainer: Any, logs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._evaluates:
            self._add_values("log", logs)
        return log(trainer, logs, *args, **kwargs)

    def _add_scalar(self, add: Any, writer: Any, tag: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if self._evaluates:
            self._add_values("log", {str(tag): value})
        return add(writer, tag, value, *args, **kwargs)

    def _hand_on(self, signature: inspect.Signature, sent: str, collective: Any, *args: Any, **kwargs: Any) -> Any:
        if self._evaluates:
            value = signature.bind_partial(*args, **kwargs).arguments.get(sent)
            if _is_few_numbers(value):
                self._add_values("collective", {"": value})
        return collective(*args, **kwargs)

    def _add_text(self, call: ReportCall, text: str) -> None:
        self._add(call, NUMBER.sub("#", text), NUMBER.findall(text))

    def _add_values(self, call: ReportCall, values: Mapping[str, Any], chain: Chain = ()) -> None:
        """Adds numbers that have names. chain: the lines that report them, where they are not those that call now."""
        few = {name: value for name, value in values.items() if _is_few_numbers(value)}
        self._add(call, " ".join(few), [repr(number) for value in few.values() for number in _numbers(value)], chain)

    def _add(self, call: ReportCall, text: str, numbers: list[str], chain: Chain = ()) -> None:
        if not numbers or len(self._records) >= MOST_REPORTS:
            return
        sites = [CallSite(*place) for place in chain or self._sites.chain()]
        digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()
        self._records.append(
            ReportRecord(call, sites, self._steps_done(), digest, numbers[:MOST_NUMBERS], draws=self._draws)
        )


def _shown(value: Any) -> str:
    """Returns what print shows of a value of Python's or torch's own; of another object, nothing: its text may cost."""
    if is_a(value, Tensor):
        return str(value) if value.numel() <= MOST_ELEMENTS else ""
    return str(value) if type(value).__module__ in ("builtins", "numpy") else ""


def _is_few_numbers(value: Any) -> bool:
    if is_a(value, Tensor):
        return 0 < value.numel() <= MOST_ELEMENTS and not value.is_complex()
    return is_a(value, int | float) or (type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0)


def _numbers(value: Any) -> list[float]:
    return [float(number) for number in (value.detach().flatten().tolist() if is_a(value, Tensor) else [value])]
