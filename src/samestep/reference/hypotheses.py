"""The candidate faults that the reference replays where a training differs, and the steps at which each may act.

A hypothesis that gives the values that were found is the cause, up to others that give them too. To add one: a row of
`hypotheses`, its sentence in report/sentences/causes.toml, and a planted fault that it explains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from samestep.bounds import NO_FACTOR
from samestep.engine import Layout
from samestep.job import Job, Recipe, with_recipes
from samestep.reference.faulty_training import (
    FaultyTraining,
    Gradients,
    Hypothesis,
    Moment,
    by_norm,
    each_distinct,
    in_evaluation_mode,
    losing_what_forward_writes,
    mean_over_replicas,
    summed,
)
from samestep.reference.optimizers import Gradient, PlayedPhase
from samestep.reference.schedule import step_rows

ROUNDED_TO = (torch.bfloat16, torch.float16, torch.float32)
ROUNDING_MOVES = 8  # times its eps, at most, a loss by one rounded step
CLIPPED_UNASKED = 1.0  # the default of libraries that clip unless they are told not to
WARMING_UP = (1.0, 10.0)  # of averages whose decay is (1 + updates) / (10 + updates) at first, as timm's is


@dataclass(frozen=True)
class Steps:
    """The steps at which a hypothesis acts. id, fields: of the message that says so."""

    id: str
    includes: Callable[[Moment], bool]
    fields: Mapping[str, Any] = field(default_factory=dict)


EVERY = Steps("at_every_step", lambda moment: True)
IN_LATER_CALLS = Steps("in_later_calls_of_closure", lambda moment: moment.again)


def _at_one_step(step: int) -> Steps:
    return Steps("at_one_step", lambda moment: moment.step == step, {"step": step})


def steps_to_act_at(
    hypothesis: Hypothesis, moments: Sequence[Moment], differs_at: int, *, closure: bool
) -> Iterator[Steps]:
    """Yields the steps at which a hypothesis may act, the simplest first, so that step `differs_at` is the first whose
    loss shows it. moments: of the training. closure: whether the optimizer calls one."""
    yield EVERY
    if closure and not hypothesis.once:
        yield IN_LATER_CALLS
    first_step = max(0, differs_at - hypothesis.delay)
    if hypothesis.once or len(moments) == 1 or first_step >= len(moments):
        return
    moment, numbers = moments[first_step], [moment.step for moment in moments]
    candidates = [
        Steps("at_last_steps_of_epochs", lambda moment: moment.epoch_ends),
        Steps("at_first_steps_of_epochs", lambda moment: moment.epoch_begins),
        Steps("at_every_step_but_the_first", lambda moment: moment.step > 0),
        Steps("from_epoch_on", lambda later: later.epoch >= moment.epoch, {"epoch": moment.epoch}),
        Steps("from_step_on", lambda later: later.step >= first_step, {"step": first_step}),
        *map(_at_one_step, numbers if hypothesis.shows_at_end else [first_step]),
    ]
    tried = [set(numbers)]
    for candidate in candidates:
        chosen = {moment.step for moment in moments if candidate.includes(moment)}
        shows = bool(chosen) if hypothesis.shows_at_end else first_step in chosen
        if shows and chosen not in tried:
            tried.append(chosen)
            yield candidate


def hypotheses(job: Job, layout: Layout, training: str, quantity: str, found: Found) -> Iterator[Hypothesis]:
    """Yields the candidate faults that can act on a training of the proof's `job`, the usual ones first."""
    if quantity in ("learning rate", "optimizer steps"):
        yield from _of_schedulers(job, layout)
        yield from _of_optimizers(delay=0)
        yield from _of_rates(layout) if quantity == "learning rate" else ()
        return
    several_replicas = layout.replicas > 1
    micro_batches = len(step_rows(job, layout, 0)) > 1
    yield from _of_reductions(layout, micro_batches, job.weight is not None) if several_replicas else ()
    yield from _of_micro_batches(several_replicas) if micro_batches else ()
    yield from _of_clipping(job, layout, training)
    if training != "gradient":
        yield from _of_optimizers()
        yield Hypothesis("gradients_not_cleared", keeps=True)
        yield Hypothesis("state_of_optimizer_forgotten", forgets=True)
        yield from _of_averages(job, found.tensors)
        yield from _of_schedulers(job, layout)
        yield from _of_settings(job)
        yield from _of_carried_state(layout) if job.carry_state else ()
    yield from _of_forward(job, layout)
    for at_each_module in (True, False) if found.changed else ():
        around = losing_what_forward_writes(found.changed, at_each_module=at_each_module)
        yield Hypothesis("what_forward_writes_is_lost", {"names": found.changed}, delay=0, around=around, once=True)
    yield from _of_rounding(several_replicas, micro_batches, found.relative)
    if found.factor is not None and abs(found.factor) > NO_FACTOR:  # without a gradient nothing is trained: see causes
        factor = found.factor
        yield Hypothesis("loss_scaled_by_another_factor", {"factor": factor}, reduced=_times(factor), general=True)
    if found.tensors and training == "gradient":
        names = found.tensors
        yield Hypothesis(
            "gradients_left_out_of_reduction",
            {"tensors": names},
            reduce=lambda sums, replicas: _but_for(names, job, sums, replicas),
            parts_ways=True,
            general=True,
        )


@dataclass(frozen=True)
class Found:
    """What is known of a difference before anything is replayed. factor: of a first gradient, the number by which it is
    the right one if it is one number; None: not known. tensors: those that are wrong at the end, where others are
    right. relative: how far the first losses that differ are off, as a share of their size. changed: the parameters
    that a forward pass changes."""

    factor: float | None = None
    tensors: list[str] = field(default_factory=list)
    relative: float = 0.0
    changed: list[str] = field(default_factory=list)


def _times(factor: float) -> Callable[[Gradient], Gradient]:
    return lambda gradient: [None if tensor is None else tensor * factor for tensor in gradient]


def _of_reductions(layout: Layout, micro_batches: bool, weighed: bool) -> Iterator[Hypothesis]:
    replicas = layout.replicas
    yield Hypothesis("gradients_summed_instead_of_averaged", {"ranks": replicas}, reduced=_times(replicas))
    yield Hypothesis("gradients_averaged_twice", {"ranks": replicas}, reduced=_times(1 / replicas))
    yield Hypothesis("gradients_never_reduced", parts_ways=True, reduce=lambda sums, replicas: sums)
    yield Hypothesis(
        "averaged_per_rank_instead_of_per_row",
        weighs=lambda part: part.total / part.replicas / part.of_replica,
    )
    if micro_batches:
        yield Hypothesis("last_micro_batch_not_reduced", parts_ways=True, last_is_own=True)
        yield Hypothesis("loss_not_divided_by_micro_batches", weighs=lambda part: float(part.micro_batches))
        yield Hypothesis("share_of_the_rows_left_out", weighs=lambda part: part.total / part.weight / part.replicas)
    yield Hypothesis("rank_left_out_of_average", reduce=_without_last)
    yield Hypothesis("first_rank_alone_counts", reduce=lambda sums, replicas: [sums[0]] * replicas)
    if weighed:
        yield Hypothesis(
            "weights_of_rows_left_out", weighs=lambda part: part.rows / part.all_rows * part.total / part.weight
        )


def _without_last(sums: Gradients, replicas: int) -> Gradients:
    return [mean_over_replicas(sums[:-1], replicas)[0]] * replicas


def _but_for(names: Sequence[str], job: Job, sums: Gradients, replicas: int) -> Gradients:
    trained = [name for name, p in job.model().named_parameters() if p.requires_grad]
    mean = mean_over_replicas(sums, replicas)[0]
    return [
        [own_gradient if name in names else all_ for name, own_gradient, all_ in zip(trained, own_gradients, mean)]
        for own_gradients in sums
    ]


def _of_micro_batches(several_replicas: bool) -> Iterator[Hypothesis]:
    yield Hypothesis("gradient_of_last_micro_batch_alone", micro_batches=lambda parts, clip: parts[-1])
    yield Hypothesis("gradient_of_first_micro_batch_alone", micro_batches=lambda parts, clip: parts[0])
    yield Hypothesis("last_micro_batch_left_out", micro_batches=lambda parts, clip: summed(parts[:-1]))
    yield Hypothesis(
        "micro_batches_weigh_alike", weighs=lambda part: part.total / part.weight / part.replicas / part.micro_batches
    )
    yield Hypothesis("each_micro_batch_clipped", micro_batches=lambda parts, clip: summed(map(clip, parts)))


def _of_clipping(job: Job, layout: Layout, training: str) -> Iterator[Hypothesis]:
    limit = job.clip_norm
    if limit is None:
        yield Hypothesis(
            "gradients_clipped_to_a_norm",
            {"limit": CLIPPED_UNASKED},
            clip=_to_norm(CLIPPED_UNASKED),
        )
        return

    yield Hypothesis("clipping_left_out", clip=lambda gradients, job: gradients)
    if layout.replicas > 1:
        yield Hypothesis(
            "clipped_before_the_reduction",
            of_replica=lambda gradient: by_norm(gradient, limit),
            clip=lambda gradients, job: gradients,
        )
        ranks = layout.replicas
        for factor in (ranks, 1 / ranks, ranks**0.5, ranks**-0.5):
            yield Hypothesis(
                "gradients_clipped_to_a_norm",
                {"limit": limit * factor},
                clip=_to_norm(limit * factor),
            )
    yield Hypothesis("each_parameter_clipped", clip=_each(lambda gradient: [by_norm([g], limit)[0] for g in gradient]))
    yield Hypothesis("gradients_clipped_by_another_norm", {"norm": "inf"}, clip=_to_norm(limit, float("inf")))
    yield Hypothesis("gradients_clipped_by_another_norm", {"norm": "1"}, clip=_to_norm(limit, 1.0))
    yield Hypothesis(
        "elements_clipped",
        clip=_each(lambda gradient: [None if g is None else g.clamp(-limit, limit) for g in gradient]),
    )
    if limit != CLIPPED_UNASKED:
        yield Hypothesis("gradients_clipped_to_a_norm", {"limit": CLIPPED_UNASKED}, clip=_to_norm(CLIPPED_UNASKED))


def _each(change: Callable[[Gradient], Gradient]) -> Callable[[Gradients, Job], Gradients]:
    return lambda gradients, job: each_distinct(gradients, change)


def _to_norm(limit: float, order: float = 2.0) -> Callable[[Gradients, Job], Gradients]:
    return _each(lambda gradient: by_norm(gradient, limit, order))


def _of_optimizers(delay: int = 1) -> Iterator[Hypothesis]:
    """delay: of a loss; a rate that is missing or repeated shows at once."""
    yield Hypothesis("optimizer_step_left_out", delay=delay, steps=0)
    yield Hypothesis("optimizer_step_taken_twice", delay=delay, steps=2)


def _of_schedulers(job: Job, layout: Layout) -> Iterator[Hypothesis]:
    if job.scheduler is None:
        return
    every = job.scheduler.every
    yield Hypothesis("scheduler_before_optimizer", schedules_first=True)
    yield Hypothesis("scheduler_not_stepped", schedules=lambda training: 0)
    if layout.replicas > 1:
        ranks = layout.replicas
        yield Hypothesis("scheduler_steps_once_for_each_rank", {"ranks": ranks}, schedules=lambda training: ranks)
    if job.micro_batch:
        yield Hypothesis(
            "scheduler_steps_once_for_each_micro_batch", schedules=lambda training: training.moment.micro_batches
        )
    if job.phases:
        yield Hypothesis("scheduler_steps_once_for_each_phase", schedules_each_phase=True)
    yield Hypothesis("scheduler_steps_twice", schedules=lambda training: 2)
    for unit in {"step", "epoch"} - {every}:
        if every != "evaluation":
            identity = "scheduler_steps_each_step" if unit == "step" else "scheduler_steps_each_epoch"
            yield Hypothesis(identity, job=_scheduled(unit), once=True)


def _scheduled(every: str) -> Callable[[Job], Job]:
    return lambda job: replace(job, scheduler=job.scheduler and replace(job.scheduler, every=every))  # type: ignore[arg-type]


def _of_rates(layout: Layout) -> Iterator[Hypothesis]:
    if layout.replicas > 1:
        ranks = layout.replicas
        yield Hypothesis(
            "learning_rate_multiplied_by_ranks",
            {"ranks": ranks},
            job=lambda job: with_recipes(job, lambda recipe: _faster(recipe, ranks)),
            once=True,
        )


def _faster(recipe: Recipe, factor: float) -> Recipe:
    groups = recipe.groups

    def faster_groups(model: Any) -> list[Any]:
        return [
            {**group, "lr": group["lr"] * factor} if isinstance(group, dict) and "lr" in group else group
            for group in list(groups(model) if groups else ())
        ]

    settings = {**recipe.settings, "lr": recipe.settings.get("lr", 1e-3) * factor}
    return Recipe(recipe.cls, settings, faster_groups if groups else None)


def _of_averages(job: Job, wrong: Sequence[str]) -> Iterator[Hypothesis]:
    """wrong: the tensors that are, where others are right."""
    if not job.ema:
        return
    ema = job.ema

    def first_update_copies(decay: float, updates: int) -> float:
        return decay if updates else 0.0

    def warming_up(decay: float, updates: int) -> float:
        return min(decay, (WARMING_UP[0] + updates) / (WARMING_UP[1] + updates))

    yield Hypothesis("averaged_weights_not_updated", averages=0, shows_at_end=True)
    yield Hypothesis("averaged_weights_updated_twice", averages=2, shows_at_end=True)
    yield Hypothesis("averaged_weights_updated_before_the_step", averages_first=True, once=True)
    yield Hypothesis("weights_not_averaged", ends=lambda training: training.average.clear(), once=True)
    yield Hypothesis("averaged_weights_begin_with_the_first_step", decay=first_update_copies, once=True)
    yield Hypothesis("decay_of_average_warms_up", decay=warming_up, once=True)
    if wrong:
        yield Hypothesis("weights_of_tensors_not_averaged", {"tensors": wrong}, ends=_not_averaged(wrong), once=True)
        yield Hypothesis("averages_of_tensors_not_updated", {"tensors": wrong}, ends=_not_updated(wrong), once=True)
    for other_decay in (1 - ema, ema**2, ema**0.5, 0.9, 0.99, 0.999, 0.9999):
        yield Hypothesis("average_of_another_decay", {"decay": other_decay}, decay=_constant(other_decay), once=True)


def _not_averaged(names: Sequence[str]) -> Callable[[FaultyTraining], None]:
    def forget(training: FaultyTraining) -> None:
        training.average = {name: tensor for name, tensor in training.average.items() if name not in names}

    return forget


def _not_updated(names: Sequence[str]) -> Callable[[FaultyTraining], None]:
    def begin_again(training: FaultyTraining) -> None:
        first = dict(training.job.model().named_parameters())
        training.average |= {name: first[name].detach() for name in names if name in training.average}

    return begin_again


def _constant(decay: float) -> Callable[[float, int], float]:
    return lambda of_job, updates: decay


def _of_settings(job: Job) -> Iterator[Hypothesis]:
    """Of each recipe: without one of its settings, and without its groups or what these set."""
    recipes = [phase.optimizer for phase in job.phases] or [job.optimizer]
    names = dict.fromkeys(name for recipe in recipes for name in recipe.settings if name != "lr")
    for name in names:
        yield Hypothesis(
            "setting_of_optimizer_left_out",
            {"setting": name},
            job=_job_without(name),
            once=True,
        )
    if any(recipe.groups for recipe in recipes):
        yield Hypothesis(
            "setting_of_optimizer_left_out",
            {"setting": "weight_decay of the groups"},
            job=lambda job: with_recipes(job, _without_decay_of_groups),
            once=True,
        )


def _job_without(setting: str) -> Callable[[Job], Job]:
    return lambda job: with_recipes(job, lambda recipe: _without(recipe, setting))


def _without(recipe: Recipe, setting: str) -> Recipe:
    return Recipe(recipe.cls, {key: value for key, value in recipe.settings.items() if key != setting}, recipe.groups)


def _without_decay_of_groups(recipe: Recipe) -> Recipe:
    groups = recipe.groups
    if groups is None:
        return recipe

    def undecayed(model: Any) -> list[Any]:
        return [{**group, "weight_decay": 0.0} if isinstance(group, dict) else group for group in list(groups(model))]

    return Recipe(recipe.cls, recipe.settings, undecayed)


def _of_forward(job: Job, layout: Layout) -> Iterator[Hypothesis]:
    yield Hypothesis("evaluation_mode_left_on", delay=0, around=in_evaluation_mode)
    yield Hypothesis("random_numbers_of_first_step", delay=0, masks=lambda step, micro, replica: (0, micro, replica))
    if layout.replicas > 1:
        yield Hypothesis("random_numbers_of_rank_0", delay=0, masks=lambda step, micro, replica: (step, micro, 0))
    if job.micro_batch:
        yield Hypothesis(
            "random_numbers_of_first_micro_batch", delay=0, masks=lambda step, micro, replica: (step, 0, replica)
        )
    if layout.replicas > 1 and layout.buffers == "rank0":
        yield Hypothesis(
            "buffers_not_those_of_rank_0", delay=0, layout=lambda layout: replace(layout, buffers="local"), once=True
        )


def _of_carried_state(layout: Layout) -> Iterator[Hypothesis]:
    yield Hypothesis("carried_state_not_passed_on", delay=0, carries=lambda training: training.carried.forget())
    yield Hypothesis("carried_state_kept_over_epochs", delay=0, carries_over_epochs=True, once=True)
    if layout.replicas > 1:
        yield Hypothesis("carried_state_is_of_rank_0", delay=0, carries=_states_of_first_replica)


def _states_of_first_replica(training: FaultyTraining) -> None:
    states = training.carried.states
    states.update({(replica, micro): states[0, micro] for replica, micro in states if (0, micro) in states})


def _of_rounding(several_replicas: bool, micro_batches: bool, relative: float) -> Iterator[Hypothesis]:
    for dtype in (dtype for dtype in ROUNDED_TO if relative <= ROUNDING_MOVES * torch.finfo(dtype).eps):
        name = {"dtype": str(dtype).removeprefix("torch.")}
        rounded = _rounded(dtype)
        yield Hypothesis("gradients_rounded", name, reduced=rounded)
        if micro_batches:
            between = _rounded_between(rounded)
            yield Hypothesis("gradients_rounded", name, micro_batches=between, reduced=rounded)
        if several_replicas:
            yield Hypothesis("gradients_rounded_before_the_reduction", name, of_replica=_rounded(dtype))
        yield Hypothesis("weights_rounded", name, after=_weights_rounded(dtype))
        yield Hypothesis("optimizer_state_rounded", name, after=_state_rounded(dtype))
        if dtype != torch.float32:
            yield Hypothesis(
                "autocast_around_forward",
                name,
                delay=0,
                job_of_step=_forward_under_autocast(dtype),
            )
            yield Hypothesis("autocast_around_the_loss", name, delay=0, around=_autocast(dtype))
        yield Hypothesis(
            "loss_rounded",
            name,
            delay=0,
            job_of_step=_loss_rounded(dtype),
        )


def _rounded_between(
    rounded: Callable[[Gradient], Gradient],
) -> Callable[[Sequence[Gradient], Callable[[Gradient], Gradient]], Gradient]:
    """Rounds what has been accumulated before each further micro-batch."""

    def accumulated(parts: Sequence[Gradient], clip: Callable[[Gradient], Gradient]) -> Gradient:
        total = parts[0]
        for part in parts[1:]:
            total = summed([rounded(total), part])
        return total

    return accumulated


def _rounded(dtype: torch.dtype) -> Callable[[Gradient], Gradient]:
    return lambda gradient: [None if tensor is None else tensor.to(dtype).to(tensor.dtype) for tensor in gradient]


def _loss_rounded(dtype: torch.dtype) -> Callable[[Job], Job]:
    def rounded(job: Job) -> Job:
        def criterion(output: Any, batch: Any) -> Tensor:
            loss = job.criterion(output, batch)
            return loss.to(dtype).to(loss.dtype)

        return replace(job, criterion=criterion)

    return rounded


def _forward_under_autocast(dtype: torch.dtype) -> Callable[[Job], Job]:
    return lambda job: replace(job, forward=torch.autocast("cpu", dtype)(job.forward))


def _autocast(dtype: torch.dtype) -> Callable[[FaultyTraining], Any]:
    return lambda training: torch.autocast("cpu", dtype)


def _weights_rounded(dtype: torch.dtype) -> Callable[[FaultyTraining, PlayedPhase], None]:
    def round_weights(training: FaultyTraining, phase: PlayedPhase) -> None:
        with torch.no_grad():
            for parameter in training.parameters:
                parameter.copy_(parameter.to(dtype))

    return round_weights


def _state_rounded(dtype: torch.dtype) -> Callable[[FaultyTraining, PlayedPhase], None]:
    def round_state(training: FaultyTraining, phase: PlayedPhase) -> None:
        for state in phase.optimizer.state.values():
            for tensor in state.values():
                if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dim():
                    tensor.copy_(tensor.to(dtype))

    return round_state
