"""What an engine's launches measured: which steps count, whose memory, and what is compared with what."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_results import MACHINE

from samestep.records.files import write
from samestep.records.record import RankRecord, Record
from samestep.records.results import StepTime, Summary
from samestep.records.training_record import TrainingRecord
from samestep.report.figures.speed import Measured, measurement
from samestep.world import World

MIB = 2**20
# An epoch has 3 steps of 8, 8 and 4 rows. Steps 2 to 5 are measured: 4 + 8 + 8 + 4 = 24 rows.
MEASURED = Measured(warmup_steps=2, measured_steps=4, global_batch=8, rows=20, steps_per_epoch=3)
WARMUP_S, STEP_S = [9.0, 7.0], [0.1, 0.2, 0.1, 0.2]
WAIT_S = [0.01, 0.02, 0.03, 0.04]


def launch(folder: Path, slowness: float = 1.0, mib: tuple[int, ...] = (3, 5), startup_s: float = 4.0) -> Record:
    """The record of a launch with a rank for each of `mib`, its peak memory. Rank 0 has 40 samples/s / `slowness`."""
    folder.mkdir()
    for rank, peak in enumerate(mib):
        observations = TrainingRecord(
            losses=[1.0 + 2 * rank, 2.0 + 2 * rank, 3.0 + 2 * rank],
            step_of=[0, 0, 1],
            weight_of=[3.0, 1.0, 2.0 + 4 * rank],
            step_s=[(1 + rank) * slowness * s for s in WARMUP_S + STEP_S],
            wait_s=[8.0, 6.0, *WAIT_S],
            began_at=100.0 + startup_s + rank,
            peak_memory_bytes=peak * MIB,
        )
        world = World(rank=rank, size=len(mib), local_rank=rank, local_size=len(mib))
        record = RankRecord(
            rank, world, threads=1, started_at=100.0, machine=MACHINE, trainings={"measure": observations}
        )
        write(folder / f"rank{rank}.json", record)
    return Record(folder)


def test_only_the_measured_steps_count(tmp_path: Path) -> None:
    """The warm-up's steps take fifty times as long, and would have 28 rows in the first 4 steps."""
    found = measurement([launch(tmp_path / "0")], [], 2, MEASURED)
    (of_launch,) = found.launches
    assert of_launch.samples_per_second == pytest.approx(24 / 0.6)
    assert of_launch.step_ms == pytest.approx([100.0, 200.0, 100.0, 200.0])
    assert of_launch.wait_ms == pytest.approx([10.0, 20.0, 30.0, 40.0])
    assert found.step_ms == StepTime(wait=pytest.approx(25.0), step=pytest.approx(150.0))
    assert found.samples_per_second == Summary(*[pytest.approx(40.0)] * 3, n=1)


@pytest.mark.parametrize("mib", [(3, 5, 4), (5, 3, 4), (3, 4, 5)])
def test_the_peak_memory_is_the_largest_ranks(mib: tuple[int, ...], tmp_path: Path) -> None:
    assert measurement([launch(tmp_path / "0", mib=mib)], [], 3, MEASURED).peak_memory_mib == 5.0


def test_launches_are_summed_up(tmp_path: Path) -> None:
    """Launches of 40, 20 and 10 samples/s."""
    records = [
        launch(tmp_path / "0", mib=(3, 5), startup_s=4.0),
        launch(tmp_path / "1", 2.0, mib=(7, 2), startup_s=9.0),
        launch(tmp_path / "2", 4.0, mib=(1, 6), startup_s=5.0),
    ]
    found = measurement(records, [], 2, MEASURED)
    assert [of.repeat for of in found.launches] == [0, 1, 2]
    assert [of.peak_memory_mib for of in found.launches] == [5.0, 7.0, 6.0]
    assert found.peak_memory_mib == 7.0
    assert [of.startup_s for of in found.launches] == [4.0, 9.0, 5.0]
    assert found.startup_s == 5.0
    assert found.step_ms.step == pytest.approx(300.0)  # of 100 to 800: the median of all 12 steps
    speed = found.samples_per_second
    assert (speed.median, speed.low, speed.high) == pytest.approx((20.0, 10.0, 40.0))
    assert speed.n == 3


def test_the_ratio_is_to_one_process_in_the_same_round_and_the_efficiency_to_each_replica(tmp_path: Path) -> None:
    """The second round is twice as slow for both."""
    records = [launch(tmp_path / "0"), launch(tmp_path / "1", 2.0)]
    alone = [launch(tmp_path / "2", 3.0, mib=(1,)), launch(tmp_path / "3", 6.0, mib=(1,))]
    found = measurement(records, alone, 2, MEASURED)
    assert found.ratio == Summary(*[pytest.approx(3.0)] * 3, n=2)
    assert found.efficiency == Summary(*[pytest.approx(1.5)] * 3, n=2)
    unpaired = measurement(records, [], 2, MEASURED)
    assert unpaired.ratio is None and unpaired.efficiency is None


def test_losses_are_the_global_batchs_means_from_the_first_step(tmp_path: Path) -> None:
    """Step 0 has two micro-batches on each rank: (1 x 3 + 2 x 1) + (3 x 3 + 4 x 1) over 8. Step 1: 3 x 2 + 5 x 6."""
    (of_launch,) = measurement([launch(tmp_path / "0")], [], 2, MEASURED).launches
    assert of_launch.losses == pytest.approx([18 / 8, 36 / 8])
