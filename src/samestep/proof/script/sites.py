"""Where in the user's code a finding arises: the lines that were recorded, and those that the source tells.

Two tables say which places each finding is about, by its id or else by its question; `located` looks them up. A finding
that names its lines already keeps them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from samestep.proof.script.findings import Ranks, module_name
from samestep.proof.script.source import RANK, RANKS, Source
from samestep.proof.script.source_search import (
    aliases,
    calls,
    changes_of,
    changes_of_gradients,
    changes_of_weights,
    decisions_by_rank,
    ends_of_loops,
    finite_checks,
    freezes,
    groups,
    reads_of_gradients,
    seeds,
    shares,
    strings_with,
    sums_around,
    synchronisation,
    writes,
)
from samestep.records.call_site import Call, CallRecord, CallSite
from samestep.records.findings import Finding, Question
from samestep.records.redaction import redacted_text
from samestep.records.script import ScriptRecord

PASSES = ("forward", "backward")  # functions of a module, or of torch.autograd.Function
MOST, LONGEST = 5, 160  # lines of a finding, and characters of one
Sources = Mapping[str, Source]  # path of a file -> what it holds


@dataclass(frozen=True)
class Context:
    """What a place is looked up in. rank: the record of the rank that a finding is about; ranks: of all, as what this
    rank left out the others have called. sources: the user's files."""

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
LINES: Mapping[str, Sequence[Place]] = {
    "rows_not_shared_out": (called("loader"), called("sampler"), SEEDS),
    "ranks_train_the_same_batches": (SEEDS, *SHARING),
    "samplers_do_not_share_one_order": OF_ONE_ORDER,
    "ranks_train_the_same_rows": OF_ONE_ORDER,
    "set_epoch_never_called": (epochs, called("sampler")),
    "set_epoch_without_shuffle": (called("sampler"), called("set_epoch")),
    "set_epoch_given_the_same_number": (called("set_epoch"), epochs),
    "generator_of_shuffling_is_seeded_anew": (called("loader"),),
    "ranks_begin_with_different_weights": (
        parameter,
        LOADS,
        around(called("collective", "broadcast")),
        SEEDS,
        called("wrapper"),
    ),
    "parameters_frozen_on_some_ranks": FREEZING,
    "loss_not_divided_by_accumulation": (BACKWARD, FORWARD),
    "some_losses_not_divided_by_accumulation": (into(BACKWARD), BACKWARD, FORWARD),
    "gradients_never_cleared": (BACKWARD, called("zero_grad"), STEP),
    "gradients_removed_before_the_step": (STEP, called("zero_grad")),
    "gradients_removed_between_micro_batches": (called("zero_grad"), BACKWARD),
    "ranks_accumulate_different_numbers": SKIPPING,
    "micro_batch_skipped_on_some_ranks": SKIPPING,
    "losses_weigh_nothing_on_some_ranks": (decided_by_rank(BACKWARD), flowing(BACKWARD, RANK), *SKIPPING),
    "ranks_never_reduce_gradients": (
        UNWRAPPED,
        written(synchronisation),
        FORWARD,
        BACKWARD,
        called("wrapper"),
        READS,
    ),
    "gradients_divided_and_never_reduced": (READS, BACKWARD, STEP),
    "parameters_left_out_of_reduction": (
        beside(REDUCTION, Source.conditions),
        around(REDUCTION),
        parameter,
        called("wrapper"),
    ),
    "asynchronous_reduction_not_awaited": (OF_GRADIENTS, WAITS, REDUCTION, STEP),
    "reduced_before_last_micro_batch": (written(synchronisation), BACKWARD),
    "last_micro_batches_in_no_step": (STEP, BACKWARD),
    "gradients_summed_over_ranks": (
        REDUCTION,
        WAITS,
        OF_GRADIENTS,
        BACKWARD,
    ),
    "gradients_divided_by_ranks_again": (beside(REDUCTION, Source.uses), OF_GRADIENTS, *LOSS),
    "clipped_before_reduction": (called("clip"), calling(OF_GRADIENTS), OF_GRADIENTS),
    "clipping_depends_on_ranks": (flowing(called("clip")), flowing(OF_GRADIENTS), called("clip"), OF_GRADIENTS),
    "gradient_of_no_known_mistake": (called("clip"), calling(OF_GRADIENTS), REDUCTION, BACKWARD),
    "ranks_draw_the_same_random_numbers": (SEEDS,),
    "workers_repeat_noise": (called("loader"), SEEDS),
    "datasets_of_ranks_repeat_noise": (SEEDS, called("loader")),
    "loader_workers_share_a_seed": (called("loader"), SEEDS),
    "evaluated_rows_counted_twice": (evaluated("loader"), evaluated("collective")),
    "rows_evaluated_by_no_rank": (evaluated("loader"), evaluated("sampler")),
    "rates_differ_between_ranks": (
        decided_by_rank(called("scheduler step")),
        flowing(called("optimizer"), RANK),
        decided_by_rank(written(lambda source: calls(source, "step"))),
        called("scheduler step"),
        RATE_WRITES,
        called("optimizer"),
    ),
    "weights_end_elsewhere": (flowing(DECAY_WRITES), flowing(called("optimizer")), STEP),
    "gather_without_gradient": (GATHER,),
    "gather_cuts_gradient": (GATHER,),
    "gathered_gradient_incomplete": (beside(GATHER, Source.backwards), GATHER, *LOSS),
    "negatives_of_own_rank": (beside(FORWARD, Source.uses), GATHER, *LOSS),
    "rows_normalised_by_own_rank": (beside(FORWARD, Source.statistics), into(FORWARD), *LOSS),
    "targets_of_ranks_apart": (TARGETS, *LOSS),
    "loss_of_same_outputs_apart": (*OF_RANKS, TARGETS, called("collective"), *LOSS[3:]),
    "loss_of_whole_outputs_apart": (called("collective"), *LOSS),
    "loss_depends_on_ranks": (flowing(MODES, RANK), *OF_RANKS, TARGETS, called("collective"), *LOSS[3:]),
    "mean_of_rank_means": (DIVISORS, called("collective"), *LOSS),
    "mean_of_rank_means_or_a_term": (*OF_RANKS, DIVISORS, called("collective"), *LOSS[3:]),
    "gradient_divided_by_the_ranks": (*OF_RANKS, DIVISORS, called("collective"), *LOSS[3:]),
    "gradient_multiplied_by_the_ranks": (*OF_RANKS, DIVISORS, called("collective"), *LOSS[3:]),
    "later_gradients_apart": (*OF_RANKS, REDUCTION, beside(REDUCTION, Source.uses), called("collective"), *LOSS[3:]),
    "optimizer_adds_gradients_up": (REDUCTION, READS, called("collective"), STEP),
    "tied_weight_comes_apart": (tied, OF_WEIGHTS, parameter),
    "updates_lost_in_rounding": (called("optimizer"), into(called("optimizer"))),
    "reference_follows_policy": (written(aliases), called("evaluation")),
    "loss_never_changes": (BACKWARD, into(BACKWARD)),
    "ranks_evaluate_at_different_steps": (
        decided_by_rank(called("evaluation")),
        beside(called("evaluation"), Source.conditions),
        called("evaluation"),
    ),
    "ranks_save_at_different_steps": (
        decided_by_rank(called("save")),
        beside(called("save"), Source.conditions),
        called("save"),
    ),
    "average_never_updated": (
        network,
        called("frozen forward"),
        beside(OF_WEIGHTS, Source.conditions),
        calling(OF_WEIGHTS),
        OF_WEIGHTS,
    ),
    "average_updated_at_each_micro_batch": (UPDATES, OF_WEIGHTS),
    "average_updated_before_step": (UPDATES, OF_WEIGHTS),
    "same_weights_other_average": (OF_WEIGHTS, UPDATES, called("frozen forward"), STEP),
    "same_gradient_clipped_otherwise": (called("clip"), OF_GRADIENTS, STEP),
    "same_steps_other_gradient": (OF_WEIGHTS, BACKWARD, into(BACKWARD)),
    "same_gradient_other_weights": (called("optimizer"), STEP, OF_WEIGHTS),
    "same_rows_other_statistics": (called("model", "BatchNorm"), called("model"), FORWARD),
    "trained_in_one_alone": (FREEZES, parameter),
    "gradients_cleared_in_one": (called("zero_grad"), BACKWARD, STEP),
    "set_epoch_in_one": (called("set_epoch"), epochs, called("sampler")),
    "schedule_made_otherwise": (called("scheduler"), called("scheduler step")),
    "steps_come_apart": (*AVERAGES, BACKWARD),
    "queue_not_gathered": (buffer,),
    "buffer_of_own_rows": (buffer, into(buffer)),
    "buffer_begins_apart": (buffer, SEEDS),
    "replica_reads_other_rows": (called("sampler"), *SHARING, FORWARD),
    "replicas_train_the_same_rows": OF_ONE_ORDER,
    "replica_begins_apart": (flowing(SEEDS, RANK), SEEDS, parameter, DIVIDES),
    "replica_draws_apart": (SEEDS, FORWARD),
    "replica_gradient_apart": (planned, parameter, DIVIDES, FORWARD, BACKWARD),
    "replica_drifts_apart": (*OF_RANKS, OF_GRADIENTS, OF_WEIGHTS, parameter, STEP),
    "clipped_by_local_norms": (called("clip"), READS, OF_GRADIENTS, calling(OF_GRADIENTS), STEP),
    "whole_gradients_added_up": (REDUCTION, OF_GRADIENTS, STEP),
    "reduced_along_some_axes": (DIVIDES, REDUCTION, OF_GRADIENTS),
    "replica_is_no_one_process": (*OF_RANKS, DIVIDES, called("collective"), *LOSS[3:]),
    "replica_losses_apart": (*OF_RANKS, *LOSS[3:], called("collective")),
    "log_softmax_alone_in_loss_parallel": (
        written(lambda source: calls(source, "log_softmax")),
        written(lambda source: calls(source, "loss_parallel")),
        *LOSS,
    ),
    "elements_without_gradient": (
        written(lambda source: calls(source, "embedding")),
        DIVIDES,
        called("collective"),
        FORWARD,
    ),
    "stage_not_reduced_over_replicas": (REDUCTION, called("wrapper"), OF_GRADIENTS, STAGE, SCHEDULE, PIPELINE_STEP),
    "gradients_added_over_stages": (REDUCTION, OF_GRADIENTS, called("wrapper")),
    "micro_batches_left_out": (called("zero_grad"), OF_GRADIENTS, PIPELINE_STEP),
    "tied_copies_not_summed": (REDUCTION, OF_GRADIENTS, PIPELINE_STEP, STEP),
    "stage_gradient_unexplained": (OF_GRADIENTS, REDUCTION, PIPELINE_STEP),
    "micro_batches_never_divided": (SCHEDULE, OF_GRADIENTS, PIPELINE_STEP),
    "earlier_calls_divided_again": (SCHEDULE, OF_GRADIENTS, PIPELINE_STEP),
    "micro_batches_divided_twice": (SCHEDULE, OF_GRADIENTS, PIPELINE_STEP),
    "stages_summed_over_replicas": (REDUCTION, OF_GRADIENTS),
    "stages_divided_by_replicas_again": (OF_GRADIENTS, REDUCTION, SCHEDULE),
    "stages_scale_gradients_apart": (SCHEDULE, OF_GRADIENTS, PIPELINE_STEP),
    "clipped_by_stage_norms": (called("clip"), LAST_CHANGES, READS, STEP),
    "tied_weight_counted_twice": (LAST_CHANGES, READS),
    "stages_step_at_other_rates": (flowing(called("optimizer"), RANK), called("optimizer"), RATE_WRITES),
    "stages_have_other_settings": (called("optimizer"),),
    "stages_begin_alike": (SEEDS, STAGE, parameter),
    "stages_of_other_models": (SEEDS, parameter, STAGE),
    "stages_read_other_rows": SHARING,
    "gradient_scaled_along_axis": (REDUCTION, OF_GRADIENTS, *OF_RANKS, DIVISORS, GATHER, BACKWARD),
    "not_reduced_along_axis": (beside(REDUCTION, Source.conditions), around(REDUCTION), OF_GRADIENTS, parameter, STEP),
    "exchange_is_cut_off": (called("collective", "all_to_all"), GATHER, called("collective"), FORWARD),
    "gradient_incomplete_along_axis": (called("collective", "reduce"), parameter, FORWARD),
    "module_is_given_otherwise": (module_forward, FORWARD),
    "module_depends_on_ranks": (module_forward, FORWARD),
    "module_computes_otherwise": (module_forward, planned, DIVIDES, parameter, called("collective"), FORWARD),
    "ranks_compute_otherwise": (called("collective"), parameter, FORWARD, BACKWARD),
    "clipped_by_norm_of_copies": (called("clip"), OF_GRADIENTS, calling(OF_GRADIENTS), STEP),
    "pieces_begin_alike": (SEEDS, parameter),
    "collectives_in_another_order": (around(called("collective")), *PARTING),
}
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
    for place in LINES.get(finding.message.id) or QUESTIONS.get(finding.question, ()):
        for site in place(context):
            sites.setdefault((site.file, site.line), site)
    return [*sites.values()][:MOST]


def files_of(ranks: Ranks) -> list[str]:
    """Returns the files of the user's code from which the ranks have called torch."""
    return list(dict.fromkeys(site.file for rank in ranks for record in rank.calls for site in record.sites))


def _sites(calls: Sequence[CallRecord]) -> list[CallSite]:
    """Returns the innermost lines of calls, then those that call a function in which one is."""
    inner = [record.sites[0] for record in calls if record.sites]
    return [*inner, *(record.sites[1] for record in calls if len(record.sites) > 1)]


def _site(file: str, source: Source, line: int) -> CallSite:
    return CallSite(file, line, source.function(line))


def _quoted(site: CallSite, sources: Sources) -> CallSite:
    """Returns a line with its text, without secrets."""
    source = sources.get(site.file)
    if source is None or site.code:
        return site
    return replace(site, code=redacted_text(source.code(site.line).strip()[:LONGEST]))
