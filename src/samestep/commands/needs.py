"""What a proof needs of the machine: memory, disk and time, estimated from the job's sizes before it starts."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil

from samestep.commands.engine_rows import Row, layouts_of
from samestep.commands.inspected_setup import InspectedSetup
from samestep.errors import UserError, say
from samestep.message import message
from samestep.records.results import Verdict
from samestep.world import resources

# Bytes a parameter, in float64. Of the reference: weights, gradient, Adam's two moments, the state that a training with
# noise is compared with, and temporary copies; measured by benchmarks/proof_cost.py.
OF_REFERENCE = 62
OF_RANK = 56  # weights, gradient, its buckets, Adam's two moments, the gathered state, the evaluated model
OF_LAYOUT, OF_LAUNCH = 44, 48  # of the files: four final states, which the reference packs, and what a run saves
OF_CHECKPOINTS = 96  # three checkpoints at once, each of the weights, their average and Adam's two moments
OF_RUN, OF_INIT = 72, 8  # while a run of the proof lives: two checkpoints with its best weights; of each rank's first
PROCESS = 0.1 * 2**30  # memory besides; ranks share the memory that they were forked with
WIDER = 2  # the ratio of float64's bytes to float32's
SLOWER = 4  # the ratio of float64's seconds to float32's, without the libraries that have kernels for float32 alone
PARAMETER_S = 30e-9  # of a step, to update, perturb and compare a parameter
PLENTY = 2**30  # a proof that needs less memory gets no message


@dataclass(frozen=True)
class Need:
    """What a proof takes of the machine. memory, disk: bytes. seconds: of the reference and the engines' trainings.
    memory_at_once: of the reference and the ranks, where they train at the same time."""

    memory: float
    memory_at_once: float
    disk: float
    seconds: float

    def __str__(self) -> str:
        duration = timedelta(seconds=round(self.seconds, -1 if self.seconds > 60 else 0))
        return f"about {_gb(self.memory)} of memory, {_gb(self.disk)} of disk and {duration}"


@dataclass(frozen=True)
class Room:
    """Bytes of this machine, or of this process's control group."""

    memory: float
    free_memory: float
    free_disk: float


def need_of(inspected: InspectedSetup, rows: list[Row]) -> Need:
    """Estimates what the proof of `rows` needs."""
    data, model, proof = inspected.job.data, inspected.job.model, inspected.job.proof
    layouts = {layout for row in rows for layout in layouts_of(row, quick=inspected.setup.quick) if layout}
    of_step = proof.rows or data.global_batch
    at_once = -(-of_step // (inspected.size * data.micro_batches.get(inspected.size, 1)))
    activations = WIDER * model.row_bytes * at_once
    ranks = max((row.facts.processes or 1) for row in rows) / inspected.machines.nnodes
    reference = PROCESS + OF_REFERENCE * model.parameters + activations
    trained = ranks * (PROCESS + OF_RANK * model.parameters + activations)
    of_layout = (2 if proof.costly else 3) * (1 + 3 * proof.steps)
    steps = (1 + len(layouts)) * of_layout + len(rows) * (2 + 4 * proof.steps)
    seconds = steps * (of_step * model.row_s * SLOWER + model.parameters * PARAMETER_S)
    disk: float = (len(layouts) * OF_LAYOUT + len(rows) * OF_LAUNCH) * model.parameters
    disk += OF_CHECKPOINTS * model.parameters if any(row.continued_by for row in rows) else 0
    disk += 0 if inspected.setup.quick else (OF_RUN + OF_INIT * ranks) * model.parameters
    return Need(max(reference, trained), reference + trained, disk, seconds)


def refuse_large_second_size(inspected: InspectedSetup, rows: list[Row], room: Room) -> None:
    """Gives a verdict to rows that this machine's memory does not hold on their second number of ranks."""
    data, model, proof = inspected.job.data, inspected.job.model, inspected.job.proof
    for row in rows:
        second = proof.second_of(row.facts)
        if not (row.second and second) or inspected.inspection.devices[0] != "cpu":
            continue
        activations = WIDER * model.row_bytes * -(-(second.proof_rows or data.global_batch) // second.ranks)
        memory = second.ranks * (PROCESS + OF_RANK * model.parameters + activations)
        if memory > max(PLENTY, room.free_memory):
            why = message("second_size_needs_memory", memory_gb=memory / 1e9, free_gb=room.free_memory / 1e9)
            row.second.verdict = row.second.verdict or Verdict("refused", reason=why)


def room_in(folder: Path) -> Room:
    """Returns the room that this process and `folder` have."""
    memory, limit = psutil.virtual_memory(), resources.memory_limit(around=False)
    total, free = float(memory.total), float(memory.available)
    if limit and limit < total:
        total, free = float(limit), min(free, float(limit))
    return Room(total, free, float(shutil.disk_usage(folder).free))


def check_needs(need: Need, room: Room, device: str) -> None:
    """Says what a proof needs that is more than the machine has free. Raises UserError where it cannot fit.

    On a GPU the memory is not the machine's.
    """
    memory = need.memory if device == "cpu" and need.memory > PLENTY else 0.0
    helps = "give fewer ranks (--nproc), one engine (--engine), a smaller model"
    if memory > room.memory:
        raise UserError(f"the proof needs {need}, and this machine has {_gb(room.memory)} of memory; {helps}")
    if need.disk > room.free_disk:
        raise UserError(
            f"the proof needs {need}, and the results' folder has {_gb(room.free_disk)} free; {helps}, or another "
            "folder with --out"
        )
    if memory > room.free_memory:
        say(
            message(
                "proof_needs_more_memory_than_is_free",
                memory_gb=need.memory / 1e9,
                disk_gb=need.disk / 1e9,
                seconds=need.seconds,
                free_gb=room.free_memory / 1e9,
            )
        )


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
