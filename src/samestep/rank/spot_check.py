"""Spot checks: now and then this rank keeps what one step began with and what came of it, for a replay in one process.

Between the two nothing is synchronised: the rank copies its state before the step and after it, its gradient before
the reduction by a hook on each parameter, and writes all in a thread. Rank 0 has the process that replays the steps,
tasks/replay_step.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from samestep.errors import SamestepError, say
from samestep.job import Batch, MicroBatch
from samestep.job.phases import CHECKPOINTED
from samestep.message import Message, as_said, message
from samestep.rank.checkpoint_files import pack, write_part
from samestep.rank.checkpoint_state import TrainingState, named_parameters
from samestep.rank.digests import digest_rows
from samestep.rank.parts import Part
from samestep.rank.shards import block_of, is_shard, place_of
from samestep.rank.step import OF_MODULES
from samestep.records.files import write
from samestep.records.launch_files import OF_SPOT_CHECKS
from samestep.records.record import attempt
from samestep.records.spot_check import PLAN, SpotCheck, SpotCheckPlan, add_check
from samestep.world import RANK_VARIABLES, World
from samestep.world.heartbeat import CHECKPOINT, heartbeat
from samestep.world.imports import module_arguments
from samestep.world.regular_files import make_folder, remove_file, remove_folder

WAITING = 8  # steps that wait for their replay; more are not looked at
LAST_S = 600.0  # how long the end of a training waits for replays
PLAIN = (bool, int, float, str, Tensor, type(None))


class ReplayProcess:
    """The process that replays steps, on rank 0. It ends with this rank, however that ends."""

    def __init__(self, plan: SpotCheckPlan, folder: Path) -> None:
        make_folder(folder)
        write(folder / PLAN, plan)
        self._checks = Path(plan.checks)
        ranks = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", RANK_VARIABLES}
        environment = {name: value for name, value in os.environ.items() if name not in ranks}
        self._process = subprocess.Popen(
            [sys.executable, *module_arguments("samestep.worker"), "--replay-steps", str(folder / PLAN)],
            stdin=subprocess.PIPE,
            env=environment,
        )
        self._said_end = False

    def forget_checks(self) -> None:
        """Removes what is in the file of checks, unless these ranks were restarted: it is of an earlier training."""
        if not attempt():
            remove_file(self._checks)

    def announce(self, step: int) -> None:
        """Tells it that the ranks write what they have of a step."""
        assert self._process.stdin
        try:
            self._process.stdin.write(f"{step}\n".encode())
            self._process.stdin.flush()
        except OSError:
            self._say_end()

    def leave_out(self, step: int) -> None:
        """Notes that a step is not replayed, as too many wait for that."""
        add_check(self._checks, SpotCheck(step, "unknown", message("replays_do_not_keep_up", waiting=WAITING)))

    def close(self) -> None:
        """Waits until all steps that were announced are replayed."""
        assert self._process.stdin
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(LAST_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(LAST_S)
        if self._process.returncode:
            self._say_end()

    def _say_end(self) -> None:
        if not self._said_end:
            self._said_end = True
            say(message("spot_checks_have_ended", code=self._process.poll()))


class SpotChecks(Part):
    """The steps of one training that are looked at: the first that is taken here, each `every`th, and the last.

    steps: of the whole training. folder: for what the ranks write. replays: the process on rank 0; None elsewhere.
    """

    def __init__(self, world: World, every: int, *, steps: int, folder: Path, replays: ReplayProcess | None) -> None:
        self.world, self.every, self.steps = world, every, steps
        self.folder, self.replays = folder, replays
        self._first: int | None = None
        self._announced: deque[int] = deque()
        self._thread: threading.Thread | None = None
        self._failed = False
        self._recording = False  # between forward() and counted()
        self._hooks: list[RemovableHandle] = []

    def begin(self) -> None:
        """Takes in the model. What was found of an earlier one, which this one does not continue, is forgotten."""
        training = self.training
        if self.replays and not training.count.first:
            self.replays.forget_checks()
        self._model, self._scaler = training.model, training.scaler
        self._state = TrainingState(self.world, training.model, training.optimizer, {}, training.carried)

    def _is_due(self, step: int) -> bool:
        if self._first is None:
            self._first = step
        return not self._failed and (step in (self._first, self.steps - 1) or (step + 1) % self.every == 0)

    def forward(self, micro_batch: MicroBatch) -> None:
        """Copies the state that a step begins with, if the step is to be looked at."""
        if micro_batch.micro or not self._is_due(micro_batch.step):
            return
        started = time.perf_counter()
        self.finish_writing()
        tree = self._state.tree(self.training.ema)
        rank = tree["ranks"].setdefault(str(self.world.rank), {})
        rank["attributes"] = attributes_of(self._model)
        if self.world.rank:
            rank["weights"] = {name: p.data for name, p in named_parameters(self._model) if not is_shard(p)}
        try:
            self._before = pack({"before": tree})
        except SamestepError as error:
            self._end(error.message)
            return
        self._recording, self._skipped = True, self.training.count.skipped
        self._step = micro_batch.step
        scale = float(self._scaler.get_scale()) if self._scaler is not None else 1.0
        self._seen: dict[str, Any] = {"indices": [], "digests": [], "losses": [], "autocast": None, "scale": scale}
        self._gradients: dict[str, Tensor] = {}
        self._observe_gradients()
        self._capture_s = time.perf_counter() - started

    def _observe_gradients(self) -> None:
        """Copies this rank's own gradients as backward computes them, before any reduction."""
        for name, parameter in named_parameters(self._model):
            if parameter.requires_grad and not is_shard(parameter):
                self._observe(name, parameter)
        if any(is_shard(parameter) for parameter in self._model.parameters()):
            # FSDP gives its modules whole parameters in the forward pass, and reduces the gradients of these.
            for name, module in self._model.named_modules():
                hook = module.register_forward_pre_hook(self._observe_gathered(name.replace(CHECKPOINTED, "")))
                self._hooks.append(hook)

    def _observe_gathered(self, prefix: str) -> Any:
        observed: set[int] = set()

        def hook(module: nn.Module, _: Any) -> None:
            for name, parameter in module._parameters.items():
                if parameter is None or is_shard(parameter) or not parameter.requires_grad:
                    continue
                if id(parameter) not in observed:  # activation checkpointing and accumulation come here again
                    observed.add(id(parameter))
                    self._observe(f"{prefix}.{name}".lstrip("."), parameter)

        return hook

    def _observe(self, name: str, parameter: Tensor) -> None:
        def hook(gradient: Tensor) -> None:
            total = self._gradients.get(name)
            self._gradients[name] = gradient.detach().clone() if total is None else total.add_(gradient.detach())

        self._hooks.append(parameter.register_hook(hook))

    def loss(self, batch: Batch, loss: Tensor) -> None:
        """Takes in a micro-batch of the step that is looked at, and the mean loss over its rows."""
        if not self._recording:
            return
        micro_batch, kind = batch.micro_batch, self.world.device.partition(":")[0]
        self._seen["indices"].append(micro_batch.indices[: micro_batch.rows].tolist())
        self._seen["digests"].append(digest_rows(batch.data, micro_batch.rows))
        self._seen["losses"].append(loss.detach().clone())
        if torch.is_autocast_enabled(kind):
            self._seen["autocast"] = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")

    def counted(self) -> None:
        """Copies what the step has made, and begins to write it."""
        if not self._recording:
            return
        started = time.perf_counter()
        self._recording = False
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        tree = self._state.tree(self.training.ema)
        del tree["model"]
        rank = tree["ranks"].setdefault(str(self.world.rank), {})
        rank["weights"] = {
            name: {"block": block_of(p), "offset": list(place_of(p)[1])} for name, p in named_parameters(self._model)
        }
        rank |= self._seen | {
            "gradients": self._gradients,
            "skipped": self.training.left_out,
            "skipped_before": self._skipped,
            "threads": torch.get_num_threads(),
        }
        packed, pieces = pack({"after": tree})
        if self.world.device != "cpu":
            torch.cuda.synchronize(self.world.device)
        before, before_pieces = self._before
        rank_packed = packed["after"]["ranks"][str(self.world.rank)]
        rank_packed["capture_s"] = self._capture_s + time.perf_counter() - started
        del self._before, self._gradients, self._seen
        self._thread = threading.Thread(
            target=self._write, args=(self._step, before | packed, before_pieces | pieces), daemon=True
        )
        self._thread.start()
        if self.replays:
            self._announce()

    def _announce(self) -> None:
        """Tells the replaying process of the step, unless it has enough to do. Later ranks' parts may come later."""
        assert self.replays
        while self._announced and not (self.folder / f"step-{self._announced[0]}").exists():
            self._announced.popleft()  # it removes what it has replayed
        if len(self._announced) < WAITING:
            self._announced.append(self._step)
            self.replays.announce(self._step)
        else:
            self.replays.leave_out(self._step)

    def _write(self, step: int, packed: Any, pieces: Any) -> None:
        """Writes this rank's part. Runs in a thread."""
        try:
            write_part(self.folder / f"step-{step}", self.world.rank, packed, pieces, {})
        except Exception as error:
            self._end(as_said(f"{type(error).__name__}: {error}"))

    def _end(self, why: Message) -> None:
        """Looks at no more steps: a disk that is full, or a state that no file can hold, ends no training."""
        if not self._failed:
            self._failed = True
            say(message("spot_checks_cannot_be_written", rank=self.world.rank, why=why))

    def finish_writing(self) -> None:
        """Waits until what this rank has of the step before is on the disk."""
        if self._thread is not None:
            heartbeat.begin(CHECKPOINT)  # a slow disk is no slow step
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Waits for the last replay. Call it on every rank after the training."""
        self.finish_writing()
        if self.replays:
            heartbeat.begin(CHECKPOINT)
            self.replays.close()
            remove_folder(self.folder, OF_SPOT_CHECKS)


def attributes_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Returns module -> attribute -> value: numbers, texts and tensors that forward may change, such as a counter."""
    return {
        name: {key: value for key, value in vars(module).items() if key not in OF_MODULES and _is_plain(value)}
        for name, module in model.named_modules()
    }


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(type(key) is str and not key.startswith("$") and _is_plain(inner) for key, inner in value.items())
    return isinstance(value, PLAIN) and not isinstance(value, nn.Parameter) and not is_shard(value)
