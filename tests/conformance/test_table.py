"""The tables in docs/conformance.md are what the engines do today; a cell may become stronger, never weaker."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from conformance.table import BEHAVIOURS, BITWISE, COLUMNS, DIVIDING, ROWS, STRENGTH, Bench, documented, measure
from lane_marks import FULL, shared_out
from ranks import ELSEWHERE, engine_facts

# A third of the behaviours of each engine, and a seventh of those of every fourth row with a setting or a mesh.
PLAIN = [name for name, row in ROWS.items() if not row.given and not row.meshes]
CELLS = shared_out(PLAIN, [*BEHAVIOURS], of=3)
OTHERS = [name for name in ROWS if name not in PLAIN]
CELLS += shared_out(OTHERS[::4], [*BEHAVIOURS], of=7)
CELLS += [pytest.param(name, [*BEHAVIOURS], marks=FULL, id=name) for name in OTHERS if name not in OTHERS[::4]]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Bench() as bench:
        yield bench


def test_the_table_is_whole() -> None:
    table = documented()
    assert list(table) == list(ROWS)
    assert all(tuple(row) == COLUMNS for row in table.values())
    words = {row[behaviour].partition(":")[0] for row in table.values() for behaviour in BEHAVIOURS}
    assert words <= {"same", "approximate", "refused", "undefined"}
    # What no engine of the second table divided would show nothing of how it does.
    assert all(row["even batches"] == "same" for row in map(table.get, DIVIDING) if row)
    # Sums of three depend on their order, which is the ranks' own where ddp is asked for it.
    assert [table[name][BITWISE] for name in ("single", "ddp", "ddp order=rank")] == ["1", "1 2", "1 2 3"]


@pytest.mark.parametrize("engine", sorted({row.engine for row in ROWS.values()}))
def test_every_engine_is_here_in_ci(engine: str) -> None:
    facts = engine_facts(engine, 2)
    assert facts.available or "CI" not in os.environ or engine in ELSEWHERE, facts.reason


@pytest.mark.parametrize(("name", "behaviours"), CELLS)
def test_no_cell_is_weaker(name: str, behaviours: list[str], bench: Bench) -> None:
    facts = engine_facts(ROWS[name].engine, 2)
    if not facts.available:
        pytest.skip(f"{facts.reason}: {facts.install}")
    now, was = measure(bench, name, behaviours), documented()[name]
    strength = {cell: STRENGTH.index(cell.partition(":")[0]) for row in (now, was) for cell in map(row.get, behaviours)}
    weaker = {b: f"{now[b]}, was {was[b]}" for b in behaviours if strength[now[b]] < strength[was[b]]}
    assert not weaker
    sizes = {str(size) for behaviour in behaviours for size in ROWS[name].meshes or BEHAVIOURS[behaviour][1]}
    assert {*was[BITWISE].split()} & sizes <= {*now[BITWISE].split()}
