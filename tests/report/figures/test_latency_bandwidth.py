"""Bus bandwidths by nccl-tests' formulas, and fits of times whose latency and bandwidth are known."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from samestep.records.collectives import COLLECTIVES, CollectiveCurve, CollectiveRank, CollectiveResults, Timed
from samestep.records.files import read, write
from samestep.records.inspection import MachineFacts
from samestep.report.collective_page import collective_page
from samestep.report.figures.latency_bandwidth import curves, fit

SIZES = [2**k for k in range(10, 25)]


@pytest.mark.parametrize(
    ("name", "four", "eight"),
    [
        ("all_reduce", 1.5, 1.75),
        ("reduce_scatter", 0.75, 0.875),
        ("all_gather", 0.75, 0.875),
        ("all_to_all", 0.75, 0.875),
        ("gather", 0.75, 0.875),
        ("scatter", 0.75, 0.875),
        ("broadcast", 1.0, 1.0),
        ("reduce", 1.0, 1.0),
        ("send_recv", 1.0, 1.0),
        ("barrier", 0.0, 0.0),
    ],
)
def test_bus_bandwidth_is_nccl_tests(name: str, four: float, eight: float) -> None:
    assert (COLLECTIVES[name].bus_ratio(4), COLLECTIVES[name].bus_ratio(8)) == (four, eight)


def test_one_line_is_found_as_one_piece() -> None:
    (piece,) = fit(SIZES, [50e-6 + n / 1e9 for n in SIZES])
    assert (piece.latency, piece.per_byte) == (pytest.approx(50e-6), pytest.approx(1e-9))
    assert (piece.first_size, piece.last_size) == (SIZES[0], SIZES[-1])
    assert piece.error < 1e-9


def test_noise_makes_no_further_pieces() -> None:
    draw = random.Random(1)
    for _ in range(20):
        (piece,) = fit(SIZES, [(50e-6 + n / 1e9) * (1 + draw.uniform(-0.03, 0.03)) for n in SIZES])
        assert piece.latency == pytest.approx(50e-6, rel=0.05)
        assert piece.per_byte == pytest.approx(1e-9, rel=0.05)


def test_a_change_of_protocol_is_another_piece() -> None:
    """Small messages with a short latency and a low bandwidth, large ones the other way."""
    times = [10e-6 + n / 1e8 if n <= 2**16 else 400e-6 + n / 2e9 for n in SIZES]
    small, large = fit(SIZES, times)
    assert (small.latency, small.per_byte) == (pytest.approx(10e-6), pytest.approx(1e-8))
    assert (large.latency, large.per_byte) == (pytest.approx(400e-6), pytest.approx(5e-10))
    assert small.last_size == 2**16 and large.first_size == 2**17
    curve = CollectiveCurve("all_reduce", "float32", [], [small, large])
    assert curve.seconds(2**12) == pytest.approx(10e-6 + 2**12 / 1e8)
    assert curve.seconds(2**30) == pytest.approx(400e-6 + 2**30 / 2e9)


def test_neither_latency_nor_bandwidth_is_negative() -> None:
    (falling,) = fit([1, 2, 3], [3.0, 2.9, 2.8])
    assert falling.per_byte == 0 and falling.latency > 0
    (steep,) = fit([1000, 2000, 3000], [0.1, 1.2, 2.3])
    assert steep.latency == 0 and steep.per_byte > 0


def results() -> CollectiveResults:
    """All collectives on two ranks; rank 1 is the slower one."""
    ranks = [
        CollectiveRank(
            timed=[
                Timed(name, size, [late * (1e-4 + size / 1e8)] * 3)
                for name, facts in COLLECTIVES.items()
                for size in (SIZES[::2] if facts.bus_factor else [0])
            ]
        )
        for late in (1.0, 2.0)
    ]
    machine = MachineFacts("3.11", "2.13", "h0", "a <processor>", 2)
    about = ("0.1.0", "samestep collectives", "2026-01-01T00:00:00", "gloo", "cpu", "torchrun", 2, 1, machine, 9)
    return CollectiveResults(*about, wrong=[], unsupported=[], curves=curves(ranks, "float32"))


def test_the_slowest_rank_counts_and_the_record_is_read_again(tmp_path: Path) -> None:
    found = results()
    curve = found.curve("all_reduce")
    assert curve is not None
    assert curve.points[0].median == pytest.approx(2 * (1e-4 + 1024 / 1e8))
    assert curve.points[-1].bus_bandwidth == curve.points[-1].algorithm_bandwidth  # on two ranks
    write(tmp_path / "results.json", found)
    assert read(CollectiveResults, tmp_path / "results.json") == found


def test_the_page_has_both_figures_and_every_collective() -> None:
    text = collective_page(results())
    assert text.count("<svg") == 2
    assert all(f"<b>{name}</b>" in text for name in COLLECTIVES)
    assert "a &lt;processor&gt;" in text


def test_two_pieces_need_no_more_points_than_each_of_them() -> None:
    sizes = [1, 10, 100, 1000, 10_000, 100_000]
    seconds = [1e-4, 1e-4, 1e-4, 1e-1, 1.0, 10.0]
    found = fit(sizes, seconds)
    assert [(piece.first_size, piece.last_size) for piece in found] == [(1, 100), (1000, 100_000)]
    curve = CollectiveCurve("all_reduce", "float32", [], found)
    assert curve.seconds(100) == pytest.approx(1e-4) and curve.seconds(1000) == pytest.approx(1e-1)


def test_times_that_scatter_are_one_piece() -> None:
    """More pieces always leave a smaller error; one that halves it is worth it alone."""
    sizes = [4**power for power in range(5, 14)]
    seconds = [(1e-4 + 1e-8 * size) * (1.1 if place % 2 else 0.9) for place, size in enumerate(sizes)]
    assert len(fit(sizes, seconds)) == 1
