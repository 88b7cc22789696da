"""What a step costs each rank, as rows of a table: memory by what holds it, bytes sent by axis, the bubble."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from samestep.message import Message, message
from samestep.records.costs import StepCost
from samestep.records.results import CompareResults
from samestep.report import numbers
from samestep.report.figures.crossings import crossings
from samestep.report.verdicts import comparable_rows, label, title

HEADINGS = (
    message("heading_ranks"),
    message("heading_parameters"),
    message("heading_gradients"),
    message("heading_optimizer"),
    message("heading_activations_and_others"),
    message("heading_peak"),
    message("heading_sent_by_axis"),
    message("heading_bubble"),
)


@dataclass(frozen=True)
class CostRow:
    """The cost of a step to neighbouring ranks of an engine that have the same figures. cells: as HEADINGS."""

    engine: str
    cells: tuple[str, ...]


def cost_rows(results: CompareResults) -> list[CostRow]:
    """Returns the rows of all engines whose costs were looked at."""
    rows, engines = [], comparable_rows(results)
    titles = [title(engine) for engine in engines]
    for engine in engines:
        name = title(engine) if titles.count(title(engine)) == 1 else label(engine)
        numbered = [(_figures(cost), rank) for rank, cost in enumerate(engine.costs)]
        for figures, members in groupby(numbered, key=lambda pair: pair[0]):
            ranks = [rank for _, rank in members]
            named = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}–{ranks[-1]}"
            rows.append(CostRow(name, (named, *figures)))
    return rows


def crossing_lines(results: CompareResults) -> list[Message]:
    """Returns at which bandwidths engines are expected to change places, for the user to read."""
    return [
        message(
            "engines_cross_at_bandwidth",
            rate=numbers.bit_rate(crossing.bits_per_second),
            first=title(crossing.first),
            second=title(crossing.second),
            more=numbers.size(crossing.more_bytes),
            faster=numbers.duration(crossing.faster_s),
        )
        for crossing in crossings(comparable_rows(results))
    ]


def _figures(cost: StepCost) -> tuple[str, ...]:
    memory = cost.memory
    held = (memory.parameters, memory.gradients, memory.optimizer, memory.others, memory.total)
    sent = ", ".join(f"{axis} {_mib(size)}" for axis, size in cost.sent.items()) or numbers.MISSING
    bubble = numbers.MISSING if cost.bubble is None else numbers.percent(cost.bubble)
    return (*map(_mib, held), sent, bubble)


def _mib(size: int) -> str:
    return numbers.amount(size / 2**20) if size else numbers.MISSING
