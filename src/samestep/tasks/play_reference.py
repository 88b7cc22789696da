"""The referee: plays the reference for every layout of a plan, and writes what it saw for the judge to read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from samestep import reference
from samestep.engine import Layout
from samestep.errors import NotFinite, UserError
from samestep.job import Job
from samestep.records.record import tell, write_state
from samestep.run import digest_state
from samestep.tasks.inspect.load import build
from samestep.tasks.proof_job import SGD_LR, Training, proof_job, steps_of
from samestep.world import World

RATES = 12  # how often the rate of 'sgd' is quartered in search of one that the job stands
ORDERED = 1e-6  # a first loss that reversing the rows moves by more than this share depends on their order
EXPLODES = 10  # times the first loss

Plan = Mapping[str, Any]


def play_reference(plan: Plan, world: World) -> dict[str, Any]:
    """Every training for every layout: as it is, and twice more with rounding shaken. Returns the record's facts."""
    job = build(plan["job"], plan["settings"])
    referee = Referee(job, plan, world)
    return {"layouts": {str(number): referee.layout(number, planned) for number, planned in enumerate(plan["layouts"])}}


class Referee:
    """One job's reference. What is found for the first layout (dtype, learning rate) holds for all of them."""

    def __init__(self, job: Job, plan: Plan, world: World) -> None:
        self.job, self.plan, self.world = job, plan, world
        self.dtype = "float64"
        self.float64_failed: str | None = None
        self.sgd_lr: float | None = None
        self.reverses = True

    def layout(self, number: int, planned: Mapping[str, Any]) -> dict[str, Any]:
        """All trainings of one layout. A model that float64 does not fit is proven in float32, and says so."""
        layout = Layout(planned["replicas"], planned["split"], planned["buffers"])
        dtype = planned["dtype"] if self.dtype == "float64" else self.dtype
        try:
            played = self._trainings(number, layout, planned, dtype)
        except UserError:
            raise
        except Exception as error:
            if "Tried to step" in str(error):  # OneCycleLR's word for it
                raise UserError(
                    f"the job's scheduler ends before the proof's {self.plan['steps']} steps; give fewer with "
                    "--steps, or a longer schedule"
                ) from error
            if dtype == "float32":
                raise
            text = str(error).strip()
            self.dtype = dtype = "float32"
            self.float64_failed = f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
            played = self._trainings(number, layout, planned, dtype)
        why = self.float64_failed or (None if dtype == "float64" else "the engine takes no float64")
        facts = {"layout": asdict(layout), "dtype": dtype, "float64_failed": why}
        facts |= {"exact_steps": planned["exact_steps"], "clip_norm": self.job.clip_norm}
        return played | facts | {"sgd_lr": self.sgd_lr, "sgd_lr_usual": SGD_LR}

    def _trainings(self, number: int, layout: Layout, planned: Mapping[str, Any], dtype: str) -> dict[str, Any]:
        facts: dict[str, Any] = {"rounds_to": planned["rounds_to"]}
        device = self.world.device
        for name in planned["trainings"]:
            tell(self.world.rank, Path(self.plan["out"]), f"reference {name}, {layout.replicas} replicas")
            training = Training(name, self.plan["steps"], dtype, self.plan["replicas"], self.sgd_lr or SGD_LR)
            if name == "sgd" and self.sgd_lr is None:
                training, base = self._at_a_rate_it_stands(training, layout)
                self.sgd_lr = training.sgd_lr
            else:
                base = self._play(training, layout)
            small = proof_job(self.job, training)
            if name == "gradient":
                _check_reading(small, device)
                _check_repeats(base, self._play(training, layout), device)
            for variant, played in enumerate([base, *self._shaken(training, layout, base, planned)]):
                self._write(f"{number}.{name}.{variant}", played, whole=variant == 0)
                facts[f"{name}.{variant}"] = played
            base["start_digest"] = digest_state(small.model())
            base["parameters"] = [n for n, _ in small.model().named_parameters(remove_duplicate=False)]
            base["length"], base["clip_norm"] = len(small.train), small.clip_norm
        return facts

    def _shaken(
        self, training: Training, layout: Layout, base: Mapping[str, Any], planned: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """The training twice more, with rounding shaken and the rows reversed where their order means nothing."""
        dtype = getattr(torch, planned["rounds_to"] or training.dtype)
        reverses = self.reverses and not base["draws"]
        noises = [reference.Noise(dtype, seed, reverses, planned["rounds_weights"]) for seed in (1, 2)]
        played = [self._play(training, layout, noise) for noise in noises]
        first = base["seen"][0][0]["loss"]
        visible = max(ORDERED, 100 * torch.finfo(dtype).eps) * abs(first)
        if reverses and any(abs(other["seen"][0][0]["loss"] - first) > visible for other in played):
            self.reverses = False
            return self._shaken(training, layout, base, planned)
        return played

    def _play(self, training: Training, layout: Layout, noise: reference.Noise | None = None) -> dict[str, Any]:
        small = proof_job(self.job, training)
        return reference.play(small, layout, steps_of(training), noise=noise, device=self.world.device)

    def _at_a_rate_it_stands(self, training: Training, layout: Layout) -> tuple[Training, dict[str, Any]]:
        """The training at the largest rate at which its losses do not explode: what explodes amplifies rounding too."""
        for attempt in range(RATES):
            try:
                played = self._play(training, layout)
            except NotFinite:
                if attempt == RATES - 1:
                    raise
            else:
                if attempt == RATES - 1 or not _explodes(played):
                    break
            training = replace(training, sgd_lr=training.sgd_lr / 4)
        return training, played

    def _write(self, key: str, played: dict[str, Any], whole: bool) -> None:
        """The tensors go to files; what stays in `played` is JSON."""
        folder, rank = Path(self.plan["out"]), self.world.rank
        write_state(folder, rank, key, played.pop("state"))
        buffers = played.pop("buffers")
        kept = {what: played.pop(what) for what in ("start", "rank0_gradient", "before_last", "rank0_before_last")}
        if whole:
            for what, tensors in kept.items():
                write_state(folder, rank, f"{key}.{what}", tensors)
            for replica, of_replica in enumerate(buffers):
                write_state(folder, rank, f"{key}.buffers{replica}", of_replica)


def _explodes(played: Mapping[str, Any]) -> bool:
    losses = [(part["step"], abs(part["loss"])) for replica in played["seen"] for part in replica]
    return bool(max(loss for _, loss in losses) > EXPLODES * max(loss for step, loss in losses if step == 0))


def _check_reading(job: Job, device: str) -> None:
    """Raises UserError when a sample is another one when it is read again."""
    rows = list(range(min(2, len(job.train))))
    first, second = (reference.digests(reference.fetch(job, rows, 0, device), len(rows)) for _ in range(2))
    if first != second:
        raise UserError(
            "the dataset gives other values when the same sample is read again, so no two trainings of this job could "
            "be compared; put what is random into Job.augment, which is given a generator"
        )


def _check_repeats(played: Mapping[str, Any], again: Mapping[str, Any], device: str) -> None:
    """Raises UserError when the reference itself is another training the second time: nothing could be proven then."""
    for first, second in zip(played["seen"][0], again["seen"][0]):
        close = first["loss"] == second["loss"] or (
            device != "cpu" and abs(first["loss"] - second["loss"]) <= 1e-6 * abs(first["loss"])
        )
        if not close:
            raise UserError(
                "the job does not repeat itself: the same rows, weights and random seed gave a loss of "
                f"{first['loss']!r} and then of {second['loss']!r}; draw random numbers from torch alone (not from "
                "numpy or random), and keep no counters outside of the model"
            )
