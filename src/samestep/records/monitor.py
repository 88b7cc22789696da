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
    """One look at a command's processes, and at the machine. All counters count from the first look.

    seconds: since the first look. processes: that live. cpu_s, memory, read, written: as in world.resources.TreeUse.
    machine_cpu_s, machine_memory, received, sent, local: of the whole machine, as in world.resources.MachineUse.
    """

    seconds: float
    processes: int
    cpu_s: float
    memory: int
    read: int
    written: int
    machine_cpu_s: float
    machine_memory: int
    received: int
    sent: int
    local: int
    gpus: tuple[GpuUse, ...] = ()


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
    """One GPU over all samples: means, and the greatest memory and temperature. energy: joules."""

    utilisation: float | None
    memory: int | None
    own_memory: int | None
    power: float | None
    energy: float | None
    temperature: float | None


@dataclass(frozen=True)
class RankUse:
    """What one rank of the command did with its time, from its first steps on.

    seconds, steps: that were looked at. loading_s: of these, waiting for a batch; first_loading_s: of these, for the
    first one of an epoch. compute_s: the thread that trains was on a processor, loading left out; queue_s: it waited
    for one. late_share: of the time, that other ranks have waited
    for this one in collectives; None: not known. fetch_s: that it or its loader workers took to load `fetches` batches;
    fetch_cpu_s: of these, on a processor. memory, workers_memory: bytes of its own and of its loader workers', each
    page divided by the processes that share it, without files; first_memory, workers_first_memory: at the first
    look. worker_resident, worker_first_resident: the mean of the workers' resident sets then. worker_processes: how
    many there were at the latest look. line: of the user's code, at which most more of some looks at its stack found it
    than of those at a rank that is not late; '': there were none. looks_at_line, others_at_line: how many of both.
    sends: whether ranks also send to single ranks, of which it is not known who waits for whom.
    """

    rank: int
    steps: int
    seconds: float
    loading_s: float
    compute_s: float
    queue_s: float
    late_share: float | None
    fetches: int
    fetch_s: float
    fetch_cpu_s: float
    workers: int
    prefetch: int
    first_memory: int
    memory: int
    workers_first_memory: int
    workers_memory: int
    line: str = ""
    looks: int = 0
    looks_at_line: int = 0
    others_at_line: int = 0
    first_loading_s: float = 0.0
    worker_first_resident: float = 0.0
    worker_resident: float = 0.0
    worker_processes: int = 0
    sends: bool = False


@dataclass(frozen=True)
class MonitorSummary:
    """The usage of a command, summed up, as usage.json has it.

    seconds: from the first look to the last. samples: their number. interval: the mean seconds between two.
    cores: the mean number of processors at work for its processes. cpu_s, read, written: in all. memory: the greatest
    sum of resident sets that was seen. machine_cores: as cores, of all processes of the machine. machine_memory: the
    greatest. received, sent, local: bytes of the whole machine in that time. monitor_cores: what watching cost.
    notes: what could not be seen. ranks: of a training, what each did.
    """

    seconds: float
    samples: int
    interval: float
    cores: float
    cpu_s: float
    memory: int
    processes: int
    read: int
    written: int
    machine_cores: float
    machine_memory: int
    received: int
    sent: int
    local: int
    monitor_cores: float = 0.0
    gpus: tuple[GpuSummary, ...] = ()
    notes: tuple[Message, ...] = ()
    command: tuple[str, ...] = ()
    exit_code: int | None = None
    started: str = field(default="")
    ranks: tuple[RankUse, ...] = ()


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
