"""The table in docs/conformance.md is what the engines do today; a cell may become stronger, never weaker."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from conformance.table import BEHAVIOURS, ENGINES, STRENGTH, Bench, cell, documented
from ranks import engine_facts


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Bench() as bench:
        yield bench


def test_the_table_is_whole() -> None:
    table = documented()
    assert list(table) == list(ENGINES)
    assert all(list(row) == list(BEHAVIOURS) for row in table.values())
    words = {cell.partition(":")[0] for row in table.values() for cell in row.values()}
    assert words <= {"same", "approximate", "refused", "undefined"}


@pytest.mark.parametrize("engine", sorted({engine for engine, _ in ENGINES.values()}))
def test_every_engine_is_here_in_ci(engine: str) -> None:
    facts = engine_facts(engine, 2)
    assert facts.available or "CI" not in os.environ, facts.reason


@pytest.mark.parametrize("name", ENGINES)
def test_no_cell_is_weaker(name: str, bench: Bench) -> None:
    engine = ENGINES[name][0]
    facts = engine_facts(engine, 2)
    if not facts.available:
        pytest.skip(f"{facts.reason}: {facts.install}")
    table = documented()[name]
    weaker = {}
    for behaviour in BEHAVIOURS:
        now, was = cell(bench, name, behaviour), table[behaviour]
        order = [STRENGTH.index(text.partition(":")[0]) for text in (now, was)]
        if order[0] < order[1]:
            weaker[behaviour] = f"{now}, was {was}"
    assert not weaker
