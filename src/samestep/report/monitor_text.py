"""What a command used, in words: the live line of the terminal, and the sentences at the end."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from samestep.message import message
from samestep.records.monitor import GpuSummary, GpuUse, MonitorSummary, Sample
from samestep.report.numbers import MISSING, amount, percent, size


def live(now: Sample, before: Sample) -> Text:
    """The latest sample in one line. before: the sample from which rates are taken."""
    seconds = max(now.seconds - before.seconds, 1e-9)
    parts = [
        f"{now.seconds:,.0f} s",
        f"cpu {(now.cpu_s - before.cpu_s) / seconds:.2f} cores (machine "
        f"{(now.machine_cpu_s - before.machine_cpu_s) / seconds:.2f})",
        f"mem {size(now.memory)}",
        f"{now.processes} proc",
        f"disk r {rate(now.read - before.read, seconds)} w {rate(now.written - before.written, seconds)}",
        f"net in {rate(now.received - before.received, seconds)} out {rate(now.sent - before.sent, seconds)}",
    ]
    parts += [f"gpu{number} {of_gpu(gpu)}" for number, gpu in enumerate(now.gpus)]
    return Text("  ".join(parts), style="reverse")


def rate(count: float, seconds: float) -> str:
    """Bytes in seconds: '1.2 MB/s', where MB is 10^6 bytes."""
    return f"{amount(count / 1e6 / max(seconds, 1e-9)) if count > 0 else '0'} MB/s"


def of_gpu(gpu: GpuUse | GpuSummary) -> str:
    """'87 % 12.4 GiB 250 W 61 °C'"""
    facts = [
        percent(gpu.utilisation) if gpu.utilisation is not None else "",
        size(gpu.memory) if gpu.memory is not None else "",
        f"{amount(gpu.power)} W" if gpu.power is not None else "",
        f"{gpu.temperature:.0f} °C" if gpu.temperature is not None else "",
    ]
    return " ".join(fact for fact in facts if fact) or MISSING


def sentences(summary: MonitorSummary) -> Iterator[str]:
    """What was used in all, and what could not be seen."""
    memory = message("memory_of_processes", memory=size(summary.memory), processes=summary.processes)
    if not summary.processes:
        memory = message("ended_before_its_memory_was_looked_at")
    yield str(
        message(
            "command_used",
            cores=summary.cores,
            seconds=amount(summary.seconds),
            cpu_seconds=amount(summary.cpu_s),
            memory=memory,
            read=size(summary.read),
            written=size(summary.written),
        )
    )
    yield str(
        message(
            "machine_used",
            cores=summary.machine_cores,
            memory=size(summary.machine_memory),
            received=size(summary.received),
            sent=size(summary.sent),
            local=size(summary.local),
        )
    )
    for number, gpu in enumerate(summary.gpus):
        energy = None if gpu.energy is None else amount(gpu.energy / 3600)
        own_memory = None if gpu.own_memory is None else size(gpu.own_memory)
        yield str(message("gpu_used", number=number, use=of_gpu(gpu), own_memory=own_memory, energy=energy))
    yield from map(str, summary.notes)
