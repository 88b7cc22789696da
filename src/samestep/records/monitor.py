"""What a command used: samples over time, their file usage.csv, and the figures over all of them."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from samestep.errors import UserError
from samestep.message import Message
from samestep.world.nvidia import GpuUse as GpuUse

MOST_SAMPLES = 4000  # samples for the plot of a long run; usage.csv has all
CSV, SUMMARY, PAGE = "usage.csv", "usage.json", "usage.html"


@dataclass(frozen=True)
class Sample:
    """One look at a command's processes, and at the machine. All counters count from the first look."""

    seconds: float
    """Seconds since the first look."""

    processes: int
    """How many processes of the command are alive."""

    cpu_s: float
    """User and system seconds that the command's processes were on processors."""

    memory: int
    """The sum of the processes' resident sets in bytes. A page that several processes share counts for each."""

    read: int
    """Bytes that the processes read from disks, without those that the page cache answers."""

    written: int
    """Bytes that the processes wrote to disks, without those that the page cache answers."""

    machine_cpu_s: float
    """Seconds on all processors of the machine, without idle ones and those that wait for a disk."""

    machine_memory: int
    """Bytes in use on the machine that the kernel could not give to another process."""

    received: int
    """Bytes that the machine received on all network interfaces but the loopback one."""

    sent: int
    """Bytes that the machine sent on all network interfaces but the loopback one."""

    local: int
    """Bytes that the machine sent on the loopback interface."""

    gpus: tuple[GpuUse, ...] = ()
    """What each GPU of the machine does. Empty: there are none, or they cannot be read."""


# The columns of usage.csv: name -> its value, without those of the GPUs, which come last.
COLUMNS: dict[str, Callable[[Sample], float]] = {
    "seconds": lambda sample: round(sample.seconds, 3),
    "processes": lambda sample: sample.processes,
    "cpu_s": lambda sample: round(sample.cpu_s, 4),
    "memory_bytes": lambda sample: sample.memory,
    "disk_read_bytes": lambda sample: sample.read,
    "disk_written_bytes": lambda sample: sample.written,
    "machine_cpu_s": lambda sample: round(sample.machine_cpu_s, 4),
    "machine_memory_bytes": lambda sample: sample.machine_memory,
    "machine_received_bytes": lambda sample: sample.received,
    "machine_sent_bytes": lambda sample: sample.sent,
    "machine_loopback_bytes": lambda sample: sample.local,
}
GPU_COLUMNS: dict[str, Callable[[GpuUse], float | None]] = {
    "utilisation": lambda gpu: gpu.utilisation,
    "memory_bytes": lambda gpu: gpu.memory,
    "own_memory_bytes": lambda gpu: gpu.own_memory,
    "power_w": lambda gpu: gpu.power,
    "temperature_c": lambda gpu: gpu.temperature,
}


def header(gpus: int) -> list[str]:
    """Returns the names of the columns for a machine with so many GPUs."""
    return [*COLUMNS, *(f"gpu{number}_{name}" for number in range(gpus) for name in GPU_COLUMNS)]


def row(sample: Sample) -> list[float | None]:
    """Returns a sample's values, in the order of `header`. None, an empty cell: not known."""
    values: list[float | None] = [value(sample) for value in COLUMNS.values()]
    return values + [value(gpu) for gpu in sample.gpus for value in GPU_COLUMNS.values()]


def read_samples(path: Path) -> list[Sample]:
    """Reads usage.csv. A last line that is incomplete, as after a full disk, is left out. Raises UserError for a file
    that is none."""
    with open(path, newline="") as file:
        lines = list(csv.reader(file))
    gpus = (len(lines[0]) - len(COLUMNS)) // len(GPU_COLUMNS) if lines else 0
    if not lines or lines[0] != header(gpus):
        raise UserError(f"{path} is not as samestep monitor writes it; give the folder of another run")
    samples = []
    for line in (line for line in lines[1:] if len(line) == len(lines[0])):
        seconds, processes, cpu_s, memory, read, written, machine_s, used, received, sent, local = map(
            float, line[: len(COLUMNS)]
        )
        cells = [float(cell) if cell else None for cell in line[len(COLUMNS) :]]
        gpu_cells = [cells[start : start + len(GPU_COLUMNS)] for start in range(0, len(cells), len(GPU_COLUMNS))]
        integers = (int(memory), int(read), int(written), machine_s, int(used), int(received), int(sent), int(local))
        samples.append(Sample(seconds, int(processes), cpu_s, *integers, tuple(_gpu(*values) for values in gpu_cells)))
    return samples


def _gpu(
    utilisation: float | None,
    memory: float | None,
    own_memory: float | None,
    power: float | None,
    degrees: float | None,
) -> GpuUse:
    return GpuUse(utilisation, _whole(memory), _whole(own_memory), power, degrees)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def thinned(samples: list[Sample]) -> list[Sample]:
    """Returns the samples, joined in pairs until they are few enough for a plot."""
    while len(samples) > MOST_SAMPLES:
        later = samples[1:]
        samples = [samples[0], *map(_joined, later[::2], later[1::2]), *later[len(later) // 2 * 2 :]]
    return samples


def _joined(earlier: Sample, later: Sample) -> Sample:
    """Returns the later of two neighbouring samples, with the greater of what is no counter."""
    return replace(
        later,
        processes=max(earlier.processes, later.processes),
        memory=max(earlier.memory, later.memory),
        machine_memory=max(earlier.machine_memory, later.machine_memory),
    )


@dataclass(frozen=True)
class GpuSummary:
    """One GPU over all samples. A value is None if the GPU, or its driver, does not report it."""

    utilisation: float | None
    """The mean share of the time in which a kernel of any process ran, 0 to 1."""

    memory: int | None
    """The greatest memory in use by all processes, in bytes."""

    own_memory: int | None
    """The greatest memory in use by the command's processes, in bytes."""

    power: float | None
    """The mean power in watts."""

    energy: float | None
    """The energy in joules."""

    temperature: float | None
    """The greatest temperature in °C."""


@dataclass(frozen=True)
class RankUse:
    """What one rank of the command did with its time, from its first steps on."""

    rank: int
    """The number of the rank."""

    steps: int
    """How many steps were looked at."""

    seconds: float
    """How many seconds were looked at."""

    loading_s: float
    """The part of `seconds` in which the rank waited for a batch."""

    compute_s: float
    """The part of `seconds` in which the thread that trains was on a processor, without loading."""

    queue_s: float
    """The part of `seconds` in which the thread that trains waited for a processor."""

    late_share: float | None
    """The share of the time, 0 to 1, in which other ranks waited for this rank in collectives. None: not known."""

    fetches: int
    """How many batches the rank or its loader workers loaded."""

    fetch_s: float
    """Seconds that the rank or its loader workers took to load these batches."""

    fetch_cpu_s: float
    """The part of `fetch_s` on a processor."""

    workers: int
    """The number of workers of the loader that the rank reads."""

    prefetch: int
    """How many batches each of these workers loads ahead. 0: there are no workers."""

    first_memory: int
    """Bytes of the rank's own memory at the first look: each page divided by the processes that share it, without
    files."""

    memory: int
    """Bytes of the rank's own memory, as `first_memory`, at that of the two latest looks that found less memory."""

    workers_first_memory: int
    """Bytes of the loader workers' own memory, as `first_memory`, at the first look."""

    workers_memory: int
    """Bytes of the loader workers' own memory at the look of `memory`."""

    line: str = ""
    """The line of the user's code where looks at this rank's stack outnumber looks at a rank that is not late by the
    most. '': there were no looks."""

    looks: int = 0
    """How many looks found this rank's stack in the user's code."""

    looks_at_line: int = 0
    """How many of these looks found this rank at `line`."""

    others_at_line: int = 0
    """How many looks at the rank that is not late found it at `line`."""

    first_loading_s: float = 0.0
    """The part of `loading_s` in which the rank waited for the first batch of an epoch."""

    worker_first_resident: float = 0.0
    """The mean resident set of the loader workers at the first look, in bytes."""

    worker_resident: float = 0.0
    """The mean resident set of the loader workers at the look of `memory`, in bytes."""

    worker_processes: int = 0
    """How many loader workers there were at the look of `memory`."""

    sends: bool = False
    """Whether ranks also send to single ranks. It is not known which of these ranks waits for which."""


@dataclass(frozen=True)
class MonitorSummary:
    """The usage of a command, summed up, as usage.json has it."""

    seconds: float
    """Seconds from the first look to the last."""

    samples: int
    """The number of samples."""

    interval: float
    """The mean number of seconds between two samples."""

    cores: float
    """The mean number of processors on which the command's processes were at work."""

    cpu_s: float
    """Seconds that the command's processes were on processors, in all."""

    memory: int
    """The greatest sum of the processes' resident sets that was seen, in bytes."""

    processes: int
    """The greatest number of processes that was seen alive."""

    read: int
    """Bytes that the command's processes read from disks."""

    written: int
    """Bytes that the command's processes wrote to disks."""

    machine_cores: float
    """The mean number of processors on which all processes of the machine were at work."""

    machine_memory: int
    """The greatest memory in use on the machine that was seen, in bytes."""

    received: int
    """Bytes that the machine received from other machines in that time."""

    sent: int
    """Bytes that the machine sent to other machines in that time."""

    local: int
    """Bytes that the machine sent on its loopback interface in that time."""

    monitor_cores: float = 0.0
    """The mean number of processors that watching took."""

    gpus: tuple[GpuSummary, ...] = ()
    """The use of each GPU. Empty: there are none, or they cannot be read."""

    notes: tuple[Message, ...] = ()
    """What could not be seen."""

    command: tuple[str, ...] = ()
    """The command line. Empty: not known."""

    exit_code: int | None = None
    """The exit code of the command. None: not known."""

    started: str = field(default="")
    """When the first sample was taken: local time, as ISO 8601. '': not known."""

    ranks: tuple[RankUse, ...] = ()
    """What each rank of a training did. Empty: the command is no training whose ranks are known."""


def summary_of(samples: Sequence[Sample], *, monitor_s: float = 0.0, notes: Sequence[Message] = ()) -> MonitorSummary:
    """Returns the figures over samples, of which there is at least one. monitor_s: CPU seconds that watching took."""
    first, last = samples[0], samples[-1]
    seconds = max(last.seconds - first.seconds, 1e-9)
    return MonitorSummary(
        seconds=last.seconds - first.seconds,
        samples=len(samples),
        interval=seconds / max(1, len(samples) - 1),
        cores=(last.cpu_s - first.cpu_s) / seconds,
        cpu_s=last.cpu_s - first.cpu_s,
        memory=max(sample.memory for sample in samples),
        processes=max(sample.processes for sample in samples),
        read=last.read - first.read,
        written=last.written - first.written,
        machine_cores=(last.machine_cpu_s - first.machine_cpu_s) / seconds,
        machine_memory=max(sample.machine_memory for sample in samples),
        received=last.received - first.received,
        sent=last.sent - first.sent,
        local=last.local - first.local,
        monitor_cores=monitor_s / seconds,
        gpus=tuple(_gpu_summary(samples, number) for number in range(len(first.gpus))),
        notes=tuple(notes),
    )


def _gpu_summary(samples: Sequence[Sample], number: int) -> GpuSummary:
    gpus = [sample.gpus[number] for sample in samples]
    powers = [
        (later.seconds - earlier.seconds, later.gpus[number].power)
        for earlier, later in pairwise(samples)
        if later.gpus[number].power is not None
    ]
    return GpuSummary(
        _mean([gpu.utilisation for gpu in gpus]),
        max((gpu.memory for gpu in gpus if gpu.memory is not None), default=None),
        max((gpu.own_memory for gpu in gpus if gpu.own_memory is not None), default=None),
        _mean([gpu.power for gpu in gpus]),
        sum(seconds * (power or 0.0) for seconds, power in powers) if powers else None,
        max((gpu.temperature for gpu in gpus if gpu.temperature is not None), default=None),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
