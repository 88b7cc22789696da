"""An interrupted training is proven as any other, and the proof rejects and names every planted fault of a resume."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from lane_marks import in_turn
from planting import not_applying
from ranks import SOURCE, engine_facts, resumed, resumed_reference_plan, skip_unless_here
from resume.faults import FAULTS, ResumeFault
from resume.plant import DOCS, JOBS, References, plant, with_table
from resume.table import OTHERS, STRENGTH, THEMSELVES, Bench, Pair, Seen, cells, jobs_of, pairs, with_tables
from samestep.records.plan import INTERRUPTED, interruption

QUICK_PAIRS = [
    (Pair("ddp", 2, "ddp", 2), "stateful"),
    (Pair("ddp", 2, "fsdp", 3), "alike"),
    (Pair("zero", 2, "single", 1), "stateful"),
]
QUICK_FAULTS = {"epoch 0's order replayed", "momentum filled with zeros"}  # planted without `make check`, too
# Of each engine to itself two, and every pair of engines; make resume measures all of the table.
CHECKED_PAIRS = [pair for pair in pairs() if pair.first != pair.then or {pair.size, pair.then_size} == {2, 3}]


def lane_of(pair: Pair) -> pytest.MarkDecorator:
    """Of an engine that continues itself, onto more or onto fewer ranks, in turn; and every fourth pair of engines."""
    if pair.first == pair.then:
        return in_turn(4, [*THEMSELVES].index(pair.first), int(pair.size < pair.then_size))
    return in_turn(5, OTHERS.index(pair.first), OTHERS.index(pair.then), 3)  # ddp to single, single to ddp, …


RECORDS = SOURCE.parent / "results"


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Bench() as bench:
        yield bench


@pytest.fixture(scope="module")
def references(bench: Bench) -> References:
    return References(bench.reference_rank)


def test_one_training_is_interrupted_in_an_epoch_and_the_other_at_its_end() -> None:
    for seed in range(50):
        drawn = {name: interruption(seed, name, 8, 5) for name in INTERRUPTED}
        assert 5 in drawn.values()
        assert {*drawn.values()} - {5} <= {1, 2, 3, 4, 6, 7}
        assert len({*drawn.values()}) == 2
        assert {interruption(seed, name, 8, 5, only_at_end=True) for name in INTERRUPTED} == {5}
    assert {interruption(seed, "sgd", 8, 5) for seed in range(50)} == {1, 2, 3, 4, 5, 6, 7}
    assert interruption(0, "sgd", 4, 9) in (1, 2, 3)  # no epoch ends


@pytest.mark.parametrize(("pair", "job"), QUICK_PAIRS, ids=str)
def test_a_continued_training_is_the_reference(pair: Pair, job: str, bench: Bench) -> None:
    assert bench.prove(pair, job).verdict in ("same", "bitwise")


@pytest.mark.parametrize("job", ["gan", "lstm"])
def test_phases_and_carried_states_are_continued_on_other_ranks(job: str, bench: Bench) -> None:
    facts, then = engine_facts("ddp", 2), engine_facts("ddp", 3)
    reference = bench.reference_rank.work(resumed_reference_plan(JOBS[job], facts, then))
    verdict = resumed(reference, JOBS[job], (bench.of(facts), facts), (bench.of(then), then))
    assert verdict.verdict == "same", verdict


def test_a_state_that_no_checkpoint_holds_is_found(bench: Bench) -> None:
    """A model that counts its steps in an attribute."""
    facts = engine_facts("ddp", 2)
    reference = bench.reference_rank.work(resumed_reference_plan(JOBS["hidden"], facts, facts))
    ranks = bench.of(facts), facts
    first = resumed(reference, JOBS["hidden"], ranks, ranks).first_divergence
    assert first
    assert first.quantity == "loss"
    assert first.cause and first.cause.id.startswith("loss_wrong_after_loading")


@pytest.mark.parametrize(
    "pair",
    [pytest.param(each, marks=lane_of(each)) for each in CHECKED_PAIRS],
    ids=str,
)
def test_no_pair_is_weaker(pair: Pair, bench: Bench) -> None:
    was = cells(recorded_pairs()).get(str(pair))
    if was is None or was.startswith("unavailable"):
        pytest.skip(f"there is no record of it: {was or 'make resume measures it'}")
    for engine, size in ((pair.first, pair.size), (pair.then, pair.then_size)):
        skip_unless_here(THEMSELVES[engine][0], size)
    now = cells([bench.prove(pair, job) for job in jobs_of(pair)])[str(pair)]
    assert STRENGTH.index(now.partition(":")[0]) >= STRENGTH.index(was.partition(":")[0]), now


def recorded_pairs() -> list[Seen]:
    return [Seen(**row) for row in json.loads(max(RECORDS.glob("resume_*/pairs.json")).read_text())]


def recorded_faults() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads(max(RECORDS.glob("resume_*/rows.json")).read_text())
    return rows


def test_the_docs_tell_what_the_records_hold() -> None:
    rows = recorded_faults()
    assert sorted(row["fault"] for row in rows) == sorted(fault.name for fault in FAULTS)
    assert all(row["named"] and row["explained"] for row in rows)
    docs = DOCS.read_text()
    assert docs == with_table(docs, rows)
    assert docs == with_tables(docs, recorded_pairs())


def test_every_fault_applies() -> None:
    """In a moment, where planting them takes minutes."""
    assert len(FAULTS) == len({fault.name for fault in FAULTS}) >= 20
    assert {fault.name for fault in FAULTS} >= QUICK_FAULTS
    assert not_applying(FAULTS, SOURCE / "samestep") == []


@pytest.mark.parametrize(
    "fault",
    [
        fault if fault.name in QUICK_FAULTS else pytest.param(fault, marks=in_turn(6, number))
        for number, fault in enumerate(FAULTS)
    ],
    ids=lambda fault: fault.name,
)
def test_a_fault_is_caught_named_and_explained(fault: ResumeFault, references: References) -> None:
    row = plant(fault, references)
    assert row["verdict"] == "differs", row
    assert row["named"], row
    assert row["explained"], row


def test_without_a_fault_the_copy_is_the_same_training(references: References) -> None:
    nothing = ResumeFault("nothing", "training.py", "import time\n", "import time\n", named=(), cause="")
    assert plant(nothing, references)["verdict"] == "same"
