"""Finds the lines of the user's code at which a check has failed: those of the ranks, and those that led there.

Pure functions of the records of the failing ranks: their calls, their lines, and the source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from samestep.judge.places import (
    BACKWARD,
    FREEZES,
    LONGEST,
    MOST,
    PARTING,
    STEP,
    Context,
    Place,
    Sources,
    around,
    beside,
    called,
    decided_by_rank,
    flowing,
    written,
)
from samestep.judge.source import RANK, Source
from samestep.judge.source_search import calls, decisions_by_rank, ends_of_loops
from samestep.message import AS_SAID, Message
from samestep.records.call_site import CallRecord, CallSite
from samestep.records.findings import Finding
from samestep.records.redaction import redacted_text
from samestep.records.script import ScriptRecord

ENDS = written(ends_of_loops)
FROZEN_BY_RANK = (flowing(FREEZES, RANK), decided_by_rank(FREEZES))
PLACES: Mapping[str, Sequence[Place]] = {
    "rank_received_data_of_another_size": (around(called("collective")), *PARTING),
    "ranks_end_at_different_steps": (ENDS, beside(beside(ENDS, Source.into), Source.conditions)),
    "rank_leaves_after_exception": (called("leave"),),
    "ranks_meet_at_different_steps": (written(decisions_by_rank), around(called("collective"))),
    "ranks_left_behind": (decided_by_rank(STEP), decided_by_rank(BACKWARD)),
    "script_starts_fewer_ranks": (written(lambda source: [*calls(source, "Process"), *calls(source, "spawn")]),),
    "parameters_have_no_gradient": (*FROZEN_BY_RANK, called("wrapper")),
    "some_parameters_have_no_gradient": (*FROZEN_BY_RANK, called("wrapper")),
}
# Words of torch's error -> where its cause is.
TORCH_SAYS: Mapping[str, Sequence[Place]] = {
    "_scale is None": (BACKWARD,),
    "appears not to match sizes of the same param": (
        *FROZEN_BY_RANK,
        flowing(called("wrapper"), RANK),
        called("model"),
    ),
    "expects same model across all ranks": (*FROZEN_BY_RANK, flowing(called("wrapper"), RANK), called("model")),
}


def lines_of(why: Message, calls: Sequence[CallRecord], places: Sequence[CallSite], sources: Sources) -> list[CallSite]:
    """Returns the lines to look at for a failure, with their text: the innermost at which each rank failed, then those
    that its reason points to.

    calls: that the ranks had recorded. places: the innermost line of the user's code in each rank that failed.
    """
    record = ScriptRecord(
        rank=0,
        size=1,
        start={},
        steps=[],
        passes=[],
        ended="itself",
        libraries=[],
        record_s=0.0,
        step_s=[],
        calls=[*calls],
    )
    context = Context(record, Finding("steps", "differs", why), sources)
    pointed = [site for place in _places_for(why) for site in place(context)]
    sites = dict[tuple[str, int], CallSite]()
    for site in [*places, *pointed]:
        source = sources.get(site.file)
        code = redacted_text(source.code(site.line).strip()[:LONGEST]) if source else ""
        sites.setdefault((site.file, site.line), CallSite(site.file, site.line, site.function, code))
    return [*sites.values()][:MOST]


def _places_for(why: Message) -> Sequence[Place]:
    """Returns the places that a message, or the reason in it, points to."""
    inner = why.fields.get("why")
    if why.id == AS_SAID:
        text = str(why.fields.get("text", ""))
        return next((places for said, places in TORCH_SAYS.items() if said in text), ())
    return PLACES.get(why.id) or (_places_for(inner) if isinstance(inner, Message) else ())
