"""The figures over samples of what a command used, and its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestep.errors import UserError
from samestep.records.monitor import GpuSummary, Sample, header, read_samples, summary_of
from samestep.world.nvidia import GpuUse


def sample(seconds: float, **changed: float) -> Sample:
    """Each counter has another slope."""
    of = {"cpu_s": 2.0, "read": 3, "written": 4, "machine_cpu_s": 5.0, "received": 6, "sent": 7, "local": 8}
    counted = {name: 100 + type(slope)(slope * seconds) for name, slope in of.items()}
    return Sample(**{"seconds": seconds, "processes": 1, "memory": 10, "machine_memory": 20, **counted, **changed})  # type: ignore[arg-type]


def test_counters_are_counted_from_the_first_sample_and_the_rest_is_the_greatest() -> None:
    samples = [sample(10.0, memory=50), sample(11.0, processes=9), sample(14.0, machine_memory=70)]
    found = summary_of(samples, monitor_s=0.04, notes=["a note"])
    assert (found.seconds, found.samples, found.interval) == (4.0, 3, 2.0)
    assert (found.cores, found.cpu_s, found.machine_cores) == (2.0, 8.0, 5.0)
    assert (found.read, found.written, found.received, found.sent, found.local) == (12, 16, 24, 28, 32)
    assert (found.processes, found.memory, found.machine_memory) == (9, 50, 70)
    assert (found.monitor_cores, found.notes, found.gpus) == (0.01, ("a note",), ())


def test_one_sample_has_no_rate() -> None:
    found = summary_of([sample(3.0)])
    assert (found.seconds, found.samples, found.cores, found.cpu_s) == (0.0, 1, 0.0, 0.0)


def test_a_gpus_energy_is_its_power_over_time_and_what_is_not_told_does_not_count() -> None:
    told = [GpuUse(0.2, 5, 1, 100.0, 50.0), GpuUse(None, 9, None, 300.0, 70.0), GpuUse(0.6, 7, 3, None, 60.0)]
    samples = [sample(second, gpus=(gpu,)) for second, gpu in zip((1.0, 3.0, 6.0), told)]  # type: ignore[arg-type]
    assert summary_of(samples).gpus == (GpuSummary(pytest.approx(0.4), 9, 3, 200.0, 2.0 * 300.0, 70.0),)  # type: ignore[arg-type]
    none = GpuUse(None, None, None, None, None)
    silent = [sample(second, gpus=(none,)) for second in (0.0, 1.0)]  # type: ignore[arg-type]
    assert summary_of(silent).gpus == (GpuSummary(None, None, None, None, None, None),)


@pytest.mark.parametrize("text", ["", "seconds,processes\n1,2\n"])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "usage.csv").write_text(text)
    with pytest.raises(UserError, match="samestep monitor writes"):
        read_samples(tmp_path / "usage.csv")
    (tmp_path / "usage.csv").write_text(",".join(header(0)) + "\n")
    assert read_samples(tmp_path / "usage.csv") == []
