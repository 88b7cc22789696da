"""The process that replays steps of a training that goes on, and says which rank computes something else.

Rank 0 starts it (rank/spot_check.py) and writes it the number of each step; the ranks write what they have of it. It
has the lowest priority and one thread, and ends when its standard input does, or rank 0.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep import reference
from samestep.errors import NotFinite, SamestepError, UserError, say
from samestep.job.phases import CHECKPOINTED
from samestep.message import as_said, message
from samestep.rank.checkpoint_files import Saved
from samestep.records.checkpoint import files_of, steps_in
from samestep.records.files import read
from samestep.records.launch_files import OF_A_STEP
from samestep.records.spot_check import SpotCheck, SpotCheckPlan, add_check
from samestep.tasks.inspect.load import build
from samestep.tasks.judge_step import Finding, RankAfter, StepJudge, TrainedStep
from samestep.tasks.play_reference import moved_parameters
from samestep.world.processes import die_with_parent
from samestep.world.regular_files import remove_folder

PARTS_S = 120.0  # how long a rank's part may take to be seen in the shared folder
POLL_S = 0.05


def replay_main(path: str) -> None:
    """Replays the steps whose numbers come on standard input. Adds a line for each to the plan's file of checks."""
    die_with_parent()
    yield_to_others()
    torch.set_num_threads(1)
    plan, folder = read(SpotCheckPlan, Path(path)), Path(path).parent
    replays: StepReplays | None = None
    said: set[tuple[str, ...]] = set()
    for line in sys.stdin:
        began, step = time.process_time(), int(line)
        try:
            replays = replays or StepReplays(plan, folder)
            check = replays.check(step)
        except SamestepError as error:
            check = SpotCheck(step, "unknown", error.message)
        except Exception as error:  # of the job's code, or of torch
            check = SpotCheck(step, "unknown", as_said(f"{type(error).__name__}: {error}".splitlines()[0]))
        for done in (number for number in steps_in(folder) if number <= step):  # also those that rank 0 has left out
            remove_folder(folder / f"step-{done}", OF_A_STEP)
        add_check(Path(plan.checks), replace(check, replay_s=time.process_time() - began))
        if check.found is None:
            continue
        differs, kind = check.verdict == "differs", (check.found.id, *map(str, check.ranks))
        if kind not in said:  # what stays wrong is said once
            said.add(kind)
            say(check.found if differs else message("step_was_not_spot_checked", step=step, why=check.found))
        if differs and plan.stops:
            os.kill(os.getppid(), signal.SIGUSR2)  # rank 0's graceful stop


def yield_to_others() -> None:
    """Gives this process the lowest priority: it computes where a core has nothing else to do."""
    with suppress(OSError):
        os.nice(19)
    if hasattr(os, "sched_setscheduler"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


class StepReplays:
    """The replays of one training. Raises UserError for a job that gives other values each time."""

    def __init__(self, plan: SpotCheckPlan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.job = build(plan.job, plan.settings, compiled=False)
        self.moved = moved_parameters(self.job, plan.device, checked=True)
        self.rates = reference.Rates(self.job)
        self.shakes_data = True

    def check(self, step: int) -> SpotCheck:
        """Replays a step and judges it. Raises SamestepError where it cannot be replayed."""
        saved = self._saved(step)
        after = saved.state["after"]
        ranks = [after["ranks"][str(rank)] for rank in range(self.plan.world_size)]
        if any(rank["skipped"] for rank in ranks):
            raise UserError(message("step_was_left_out"))
        trained = trained_step(saved, step, self.plan.world_size, self.moved)
        # A step that fp16 has skipped moves no schedule.
        rates = None if ranks[0]["skipped_before"] else self.rates.at(step)
        try:
            finding, judge = self._judged(trained, rates, [1.0, 1.0])
            if finding and not finding.exact:
                # Once more as the rank computes, with its threads, and with more noise: a ReLU may turn by rounding.
                torch.set_num_threads(max(rank["threads"] for rank in ranks))
                finding, judge = self._judged(trained, rates, [1.0, 1.0, 1.0, 8.0, 8.0])
                torch.set_num_threads(1)
        except NotFinite as error:
            raise UserError(error.message) from None
        return SpotCheck(
            step,
            "differs" if finding else "same",
            finding.found if finding else None,
            finding.ranks if finding else [],
            largest=judge.largest,
            bitwise=judge.bitwise and not finding,
            capture_s=max(rank["capture_s"] for rank in ranks),
        )

    def _judged(
        self, trained: TrainedStep, rates: Sequence[float] | None, noise: Sequence[float]
    ) -> tuple[Finding | None, StepJudge]:
        judge = StepJudge(trained, self._replay(trained, None), lambda: self._noisy(trained, noise), rates)
        return judge.finding(), judge

    def _replay(self, trained: TrainedStep, noise: reference.Noise | None) -> reference.StepAfter:
        layout, device = self.plan.layout, self.plan.device
        return reference.replay_step(self.job, layout, trained.before, noise=noise, device=device, moved=self.moved)

    def _noisy(self, trained: TrainedStep, sizes: Sequence[float]) -> list[reference.StepAfter]:
        """Replays the step with noise of so many times the rounding."""
        dtypes = {weight.dtype for weight in trained.before.weights.values() if weight.is_floating_point()}
        if trained.before.autocast:
            dtypes.add(getattr(torch, trained.before.autocast))
        dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        replays = []
        for seed, size in enumerate(sizes, 1):
            for shakes_data in {self.shakes_data, False}:
                noise = reference.Noise(dtype, 1 + seed % 2, False, shakes_data=shakes_data)
                noise.generator.manual_seed(seed)
                noise.eps *= size
                try:
                    replays.append(self._replay(trained, noise))
                    break
                except (RuntimeError, ValueError, IndexError, UserError):
                    if not shakes_data:
                        raise
                    self.shakes_data = False  # the criterion refuses rows that are moved by rounding
        return replays

    def _saved(self, step: int) -> Saved:
        folder, until = self.folder / f"step-{step}", time.monotonic() + PARTS_S
        for rank in range(self.plan.world_size):
            while not (folder / files_of(rank)[0]).exists():
                if time.monotonic() > until:
                    raise UserError(message("part_of_a_step_is_missing", rank=rank, folder=str(self.folder)))
                time.sleep(POLL_S)
        return Saved.of_parts(folder, self.plan.world_size)


def trained_step(saved: Saved, step: int, world_size: int, moved: Sequence[str]) -> TrainedStep:
    """Reads what the ranks have written of a step. moved: the parameters that the forward pass moves."""
    before, after = saved.state["before"], saved.state["after"]
    numbers = [str(rank) for rank in range(world_size)]
    weights = saved.plain(before["model"])
    copies = [weights, *(saved.plain(before["ranks"][rank].get("weights", {})) for rank in numbers[1:])]
    ranks = [saved.plain(after["ranks"][rank]) for rank in numbers]
    return TrainedStep(
        reference.StepBefore(
            step,
            weights,
            optimizer=saved.plain(before["optimizer"]),
            groups=saved.plain(before["groups"]),
            averages=saved.plain(before.get("ema", {})),
            extra=saved.plain(before["extra"]),
            replicas=[_replica(saved.plain(before["ranks"][rank]), copies[int(rank)], moved) for rank in numbers],
            autocast=ranks[0]["autocast"],
            loss_scale=ranks[0]["scale"],
        ),
        copies[1:],
        [_rank_after(rank) for rank in ranks],
        optimizer=saved.plain(after["optimizer"]),
        averages=saved.plain(after.get("ema", {})),
    )


def _replica(rank: Mapping[str, Any], copy: Mapping[str, Tensor], moved: Sequence[str]) -> reference.ReplicaBefore:
    carried = rank.get("carried", {"epoch": -1, "of_micro": {}})
    return reference.ReplicaBefore(
        buffers=_plain_names(rank["buffers"]),
        moved={name: copy[name] for name in moved},
        attributes=rank["attributes"],
        carried=carried["of_micro"],
        carried_epoch=carried["epoch"],
    )


def _rank_after(rank: Mapping[str, Any]) -> RankAfter:
    return RankAfter(
        indices=rank["indices"],
        digests=rank["digests"],
        losses=rank["losses"],
        gradients=rank["gradients"],
        weights={name: (entry["block"], entry["offset"]) for name, entry in rank["weights"].items()},
        buffers=_plain_names(rank["buffers"]),
        scale=rank["scale"],
    )


def _plain_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace(CHECKPOINTED, ""): tensor for name, tensor in tensors.items()}
