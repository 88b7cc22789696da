"""Places in the user's code that findings are about: the lines that were recorded, and those that are found in the
source."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from samestep.judge.findings import Ranks, module_name
from samestep.judge.source import RANK, RANKS, Source
from samestep.judge.source_search import (
    calls,
    changes_of,
    changes_of_gradients,
    changes_of_weights,
    decisions_by_rank,
    ends_of_loops,
    finite_checks,
    freezes,
    reads_of_gradients,
    seeds,
    shares,
    strings_with,
    sums_around,
    writes,
)
from samestep.records.call_site import Call, CallRecord, CallSite
from samestep.records.findings import Finding
from samestep.records.script import ScriptRecord

PASSES = ("forward", "backward")  # functions of a module, or of torch.autograd.Function
MOST, LONGEST = 5, 160  # lines of a finding, and characters of one
Sources = Mapping[str, Source]  # path of a file -> its text


@dataclass(frozen=True)
class Context:
    """The records and sources in which a place is looked up. rank: the record of the rank that a finding is about;
    ranks: the records of all ranks, since the others have called what this rank left out. sources: the user's files."""

    rank: ScriptRecord
    finding: Finding
    sources: Sources
    ranks: Ranks = ()

    @property
    def loaders(self) -> tuple[int, ...]:
        """The numbers of the loader that is trained, and of those made anew for later epochs."""
        return tuple(record.loader for record in self.rank.passes if record.trained) or (-1,)

    def calls(self, call: Call) -> list[CallRecord]:
        calls = dict[tuple[str, int, tuple[CallSite, ...]], CallRecord]()
        for record in (record for rank in (self.rank, *self.ranks) for record in rank.calls if record.call == call):
            calls.setdefault((record.name, record.number, tuple(record.sites)), record)
        return [*calls.values()]


Place = Callable[[Context], list[CallSite]]


def called(call: Call, name: str = "") -> Place:
    """Returns the lines of a kind of call; of a loader or a sampler, those of the one that is trained.

    name: of the function that is called, or the class that is made; '' for any.
    """

    def place(context: Context) -> list[CallSite]:
        calls = [record for record in context.calls(call) if name in record.name]
        if call in ("loader", "sampler", "iteration"):
            calls = [record for record in calls if record.number in context.loaders] or calls
        return _sites(calls)

    return place


def between_passes(call: Call, name: str) -> Place:
    """Returns the lines of a kind of call that are in no forward or backward pass which the user wrote, if there are
    any: what these hand on are activations, and their gradients."""

    def place(context: Context) -> list[CallSite]:
        calls = [record for record in context.calls(call) if name in record.name]
        outside = [record for record in calls if not any(site.function in PASSES for site in record.sites)]
        return _sites(outside or calls)

    return place


def evaluated(call: Call) -> Place:
    """Returns the lines of loaders and samplers that are read and not trained; of other calls, those beside an
    evaluation."""

    def place(context: Context) -> list[CallSite]:
        calls = context.calls(call)
        if call in ("loader", "sampler", "iteration"):
            return _sites([record for record in calls if record.number not in context.loaders])
        functions = {site.function for record in context.calls("evaluation") for site in record.sites[:1]}
        steps = {record.first for record in context.calls("evaluation")}
        return _sites([record for record in calls if record.first in steps and record.sites[0].function in functions])

    return place


def flowing(place: Place, names: re.Pattern[str] = RANKS) -> Place:
    """Returns the lines of a place, and of what flows into it, that mention the number of ranks, or the rank."""
    return beside(place, lambda source, line: source.flowing(line, names))


def written(lines: Callable[[Source], list[int]]) -> Place:
    """Returns the lines that the source tells."""
    return lambda context: [
        _site(file, source, line) for file, source in context.sources.items() for line in lines(source)
    ]


def calling(place: Place) -> Place:
    """Returns the lines that call the functions in which a place is."""

    def callers(context: Context) -> list[CallSite]:
        names = {site.function for site in place(context)} - {"<module>", "__init__", "forward"}
        return [
            _site(file, source, line)
            for name in sorted(names)
            for file, source in context.sources.items()
            for line in calls(source, name)
        ]

    return callers


def around(place: Place) -> Place:
    """Returns the loops around a place, the innermost first."""
    return beside(place, Source.loops)


def into(place: Place) -> Place:
    """Returns the lines that flow into a place, in the loop around it."""
    return beside(place, Source.into)


def beside(place: Place, lines: Callable[[Source, int], list[int]]) -> Place:
    """Returns the lines that the source tells of each line of a place."""

    def sites_beside(context: Context) -> list[CallSite]:
        sites = [(site, source) for site in place(context) if (source := context.sources.get(site.file))]
        return [_site(site.file, source, line) for site, source in sites for line in lines(source, site.line)]

    return sites_beside


def decided_by_rank(place: Place) -> Place:
    """Returns the lines around a place, or in the same loop, that decide by the rank."""
    return beside(place, decisions_by_rank)


def parameter(context: Context) -> list[CallSite]:
    """Returns the line that has made the part of the model that holds the parameter which differs."""
    divergence = context.finding.divergence
    name = (divergence.tensor if divergence else None) or ""
    made = [record for record in context.calls("model") if name == record.name or name.startswith(f"{record.name}.")]
    made += [record for record in context.calls("model") if not record.name]
    return _sites(sorted(made, key=lambda record: -len(record.name)))[:2]


def module_forward(context: Context) -> list[CallSite]:
    """Returns the line where the forward of a finding's module begins."""
    name = context.finding.message.fields.get("module")
    modules = [module for rank in context.ranks for module in rank.modules if module_name(module.name) == name]
    return [module.site for module in modules if module.site][:1]


def planned(context: Context) -> list[CallSite]:
    """Returns the lines that name the module of a finding in a string, as a plan that divides it does."""
    divergence = context.finding.divergence
    holder = ((divergence.tensor if divergence else None) or "").rpartition(".")[0]
    name = str(context.finding.message.fields.get("module") or holder).rpartition(".")[2]
    return written(lambda source: strings_with(source, name))(context) if name.isidentifier() else []


def buffer(context: Context) -> list[CallSite]:
    """Returns the lines that change the buffer of a finding."""
    name = re.split(r"[.: ]+", str(context.finding.message.fields.get("buffer", "")))[-1]
    return written(lambda source: changes_of(source, name))(context) if name else []


def tied(context: Context) -> list[CallSite]:
    """Returns the lines that set the modules, or the weights, of a finding about a tied weight."""
    fields = context.finding.message.fields
    names = [name for field in ("embedding", "head") for name in str(fields.get(field, "")).split(".")[-2:]]
    return written(lambda source: [line for name in names for line in changes_of(source, name)])(context)


def shares_by_hand(context: Context) -> list[CallSite]:
    """Returns the lines that share the rows out by hand, where no sampler does."""
    return [] if context.calls("sampler") else written(shares)(context)


def network(context: Context) -> list[CallSite]:
    """Returns the lines that call the frozen network of a finding."""
    name = str(context.finding.message.fields.get("network", "")).rpartition(".")[2]
    return written(lambda source: calls(source, name))(context) if name.isidentifier() else []


def epochs(context: Context) -> list[CallSite]:
    """Returns the loop over epochs, in which set_epoch is to be called."""
    return around(called("iteration"))(context)[:1]


BACKWARD, FORWARD, STEP = called("backward"), called("forward"), called("optimizer step")
REDUCTION, GATHER = between_passes("collective", "reduce"), called("collective", "gather")
UNWRAPPED = beside(FORWARD, lambda source, line: [line] if ".module(" in source.code(line) else [])
RATE_WRITES = written(lambda source: writes(source, "lr"))
DECAY_WRITES = written(lambda source: writes(source, "weight_decay"))
OF_GRADIENTS = written(changes_of_gradients)
OF_WEIGHTS = written(changes_of_weights)
FREEZES = written(freezes)
READS = written(reads_of_gradients)
WAITS = written(lambda source: calls(source, "wait"))
SEEDS = written(seeds)
MODES = written(lambda source: [*calls(source, "train"), *calls(source, "eval")])
LOADS = written(lambda source: calls(source, "load_state_dict"))
SHARING = (called("sampler"), shares_by_hand, called("loader"), flowing(FORWARD, RANK), SEEDS, called("iteration"))
OF_RANKS = (flowing(BACKWARD), flowing(FORWARD), flowing(OF_GRADIENTS))
DIVISORS, TARGETS = beside(BACKWARD, Source.divisors), beside(BACKWARD, Source.targets)
LOSS = (*OF_RANKS, BACKWARD, into(BACKWARD), FORWARD)
RATES = (
    flowing(RATE_WRITES),
    flowing(called("scheduler")),
    flowing(called("optimizer")),
    flowing(calling(RATE_WRITES)),
    around(called("scheduler step")),
)
PARTING = (
    decided_by_rank(called("collective")),
    decided_by_rank(BACKWARD),
    written(ends_of_loops),
    called("collective"),
    written(finite_checks),
    BACKWARD,
)
UPDATES = calling(OF_WEIGHTS)
LAST_CHANGES = written(lambda source: changes_of_gradients(source)[::-1])
STAGE, SCHEDULE, PIPELINE_STEP = called("pipeline stage"), called("pipeline schedule"), called("pipeline step")
DIVIDES = written(lambda source: [*calls(source, "parallelize_module"), *calls(source, "fully_shard")])
AVERAGES = (decided_by_rank(OF_WEIGHTS), decided_by_rank(UPDATES), OF_WEIGHTS, UPDATES, around(OF_WEIGHTS))
EVALUATION = (
    flowing(evaluated("loader"), RANK),
    evaluated("loader"),
    evaluated("collective"),
    beside(called("evaluation"), sums_around),
    called("evaluation"),
)
FREEZING = (flowing(FREEZES, RANK), decided_by_rank(FREEZES), FREEZES, parameter)
SKIPPING = (decided_by_rank(BACKWARD), written(finite_checks), BACKWARD, FORWARD)
OF_ONE_ORDER = (flowing(called("set_epoch"), RANK), *SHARING)


def _sites(calls: Sequence[CallRecord]) -> list[CallSite]:
    """Returns the innermost lines of calls, then those that call a function in which one is."""
    inner = [record.sites[0] for record in calls if record.sites]
    return [*inner, *(record.sites[1] for record in calls if len(record.sites) > 1)]


def _site(file: str, source: Source, line: int) -> CallSite:
    return CallSite(file, line, source.function(line))
