"""Finds the lines of the user's code where a finding arises: those of its rule, else those of its question.

A finding that names its lines already keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from samestep.judge.findings import Ranks
from samestep.judge.places import (
    AVERAGES,
    BACKWARD,
    DECAY_WRITES,
    EVALUATION,
    FORWARD,
    LONGEST,
    LOSS,
    MODES,
    MOST,
    OF_GRADIENTS,
    PARTING,
    RATE_WRITES,
    RATES,
    SEEDS,
    SHARING,
    STEP,
    Context,
    Place,
    Sources,
    called,
    calling,
    epochs,
    flowing,
    into,
    parameter,
    written,
)
from samestep.judge.source import RANK
from samestep.judge.source_search import groups
from samestep.records.call_site import CallSite
from samestep.records.findings import Finding, Question
from samestep.records.redaction import redacted_text
from samestep.rules import rule_of

QUESTIONS: Mapping[Question, Sequence[Place]] = {
    "steps": PARTING,
    "initial weights": (parameter, SEEDS, called("wrapper")),
    "rows": SHARING,
    "order": (epochs, called("sampler"), called("loader")),
    "gradient": (BACKWARD, STEP),
    "loss weight": LOSS,
    "clipping": (called("clip"), calling(OF_GRADIENTS), OF_GRADIENTS),
    "rate": (*RATES, RATE_WRITES, called("scheduler step"), called("scheduler"), called("optimizer")),
    "schedule": (called("scheduler step"), RATE_WRITES, called("scheduler")),
    "weights": (*AVERAGES[:2], called("collective"), *AVERAGES[2:], STEP),
    "frozen weights": AVERAGES,
    "updates": (called("optimizer"), written(groups), parameter),
    "random numbers": (SEEDS,),
    "evaluation": EVALUATION,
    "evaluation values": EVALUATION,
    "buffers": (flowing(MODES, RANK), called("evaluation"), called("wrapper")),
    "collectives": PARTING,
    "saves": (called("save"),),
    "replayed gradient": (*LOSS[:3], called("collective"), *LOSS[3:]),
    "replayed rate": (*RATES, RATE_WRITES, called("optimizer")),
    "replayed weights": (flowing(DECAY_WRITES), flowing(called("optimizer")), *AVERAGES, STEP),
    "replayed micro-batches": (flowing(STEP), BACKWARD, STEP),
    "micro-batches": (BACKWARD, STEP),
    "precision": (FORWARD, BACKWARD),
    "loss": (BACKWARD, into(BACKWARD), FORWARD),
    "settings": (called("optimizer"), STEP),
}


def located(findings: Sequence[Finding], ranks: Ranks, sources: Sources) -> list[Finding]:
    """Returns the findings; those that differ or warn with the lines of the user's code where they arise."""
    return [
        replace(finding, sites=[_quoted(site, sources) for site in finding.sites or sites_of(finding, ranks, sources)])
        if finding.answer in ("differs", "warning")
        else finding
        for finding in findings
    ]


def context_of(finding: Finding, ranks: Ranks, sources: Sources) -> Context:
    """Returns the context of a finding: of its rank, or of rank 0."""
    number = (finding.divergence.rank if finding.divergence else None) or 0
    return Context(ranks[number if number < len(ranks) else 0], finding, sources, ranks)


def sites_of(finding: Finding, ranks: Ranks, sources: Sources) -> list[CallSite]:
    """Returns the lines where a finding arises, the likeliest first."""
    context = context_of(finding, ranks, sources)
    sites = dict[tuple[str, int], CallSite]()
    rule = rule_of(finding.message.id)
    places = rule.lines if rule and rule.lines else QUESTIONS.get(finding.question, ())
    for place in places:
        for site in place(context):
            sites.setdefault((site.file, site.line), site)
    return [*sites.values()][:MOST]


def files_of(ranks: Ranks) -> list[str]:
    """Returns the files of the user's code from which the ranks have called torch."""
    return list(dict.fromkeys(site.file for rank in ranks for record in rank.calls for site in record.sites))


def _quoted(site: CallSite, sources: Sources) -> CallSite:
    """Returns a line with its text, without secrets."""
    source = sources.get(site.file)
    if source is None or site.code:
        return site
    return replace(site, code=redacted_text(source.code(site.line).strip()[:LONGEST]))
