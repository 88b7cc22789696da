"""Runs a recorded script again in one process: feeds it the batches that the ranks read, and compares weights."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from samestep.bounds import COMPUTED_ROWS_APART_FIRST, COMPUTED_ROWS_APART_LATER, LEAST_OF_FIRST_GRADIENT
from samestep.job.foreign import attribute_of, is_a, named_buffers_in, named_parameters_in
from samestep.message import Message, message
from samestep.rank.shards import block_of
from samestep.recorder.batches import (
    CannotJoin,
    Packed,
    RowOrder,
    are_pieces,
    is_joined,
    is_rescaled_by_rank,
    joined,
    lists_of_rows,
    moved_like,
    order_of_rows,
    order_of_values,
)
from samestep.recorder.loaders import patch_loaders, rows_of
from samestep.recorder.modules_by_rank import ModulesByRank
from samestep.recorder.one_rank import (
    GatheredWithHistory,
    WholeLosses,
    allow_batches_of_all_ranks,
    leave_losses_whole,
    make_groups_of_one_rank,
    make_meshes_of_one_rank,
    make_trainers_of_one_rank,
    refuse_groups_of_several,
    tell_ranks,
)
from samestep.recorder.one_rank_for_replicas import OneRankForReplicas
from samestep.recorder.other_runs import change_run
from samestep.recorder.patches import in_backward, make_gradients_small, patch_autograd, patch_training_forwards
from samestep.recorder.random_numbers import (
    are_places,
    joined_draws,
    patch_draws,
    patch_numpy_draws,
    random_states,
    set_random_states,
    torch_state,
)
from samestep.recorder.recorder import Recorder
from samestep.recorder.replay_saver import Forward, ReplayData, Weights, buffers
from samestep.recorder.sharding import load_whole, raw_engine_gradients, refresh_engine, values_held, whole_of
from samestep.recorder.whole_weights import WholeWeights
from samestep.records.script import STATISTICS
from samestep.records.script_plan import END, KEPT, START, Distance, Feed, ReplayPlan, ReplayRecord
from samestep.records.tensor_files import read_arrays


class ReplayPlayer:
    """Feeds one process the batches of several. leave: ends the process with the result."""

    def __init__(self, recorder: Recorder, plan: ReplayPlan, leave: Callable[[ReplayRecord], NoReturn]) -> None:
        self._recorder, self._plan, self._leave = recorder, plan, leave
        folder = Path(plan.record)
        paths = [folder / KEPT.format(rank) for rank in range(plan.ranks)]
        self._ranks: list[ReplayData] = [torch.load(path, weights_only=False) for path in paths]
        # Which tensors of a model that the script divides itself are whole is known once the model is there.
        self._hand = WholeWeights(folder, plan.by_hand[0], (START, END)) if plan.by_hand else None
        self._gathered = GatheredWithHistory()
        stands_for_all = len(plan.by_hand) > 1 and plan.told_ranks == plan.ranks
        self._one_rank = OneRankForReplicas(plan.by_hand, self.stop) if stands_for_all else None
        self._start, self._end = (
            (self._hand.buffers(name) if self._hand else _weights(folder, name, self._ranks)) for name in (START, END)
        )
        self._all_ranks = self._ranks
        self._divided = bool(plan.readers)
        if plan.readers:
            self._ranks = [self._ranks[rank] for rank in plan.readers]
        self._first: dict[str, Tensor] = {}  # the first gradients
        self._forwards = self._lengths_asked = 0
        self._events = self._draws = 0  # forwards and backward passes that have begun; numbers drawn since the last
        self._read_since = self._inside = False  # whether a batch was read since then; whether a forward is running
        self._loaded: set[str] = set()
        self._rates: list[list[Any]] = []  # the rates of the replay's present steps
        self._groups: list[list[dict[str, Any]]] = []  # the groups of these steps' optimizers
        self._base_rates: list[list[float]] = []
        first = self._ranks[0]
        self._from_loader = bool(first.passes)
        # A script that computes its loss of batches that it makes itself is not fed: it must make the ranks' batches.
        self._makes = not self._from_loader and not all(forward.loss for forward in first.forwards)
        self._by_rank = not plan.in_turn and any(rank.draws or rank.batch_norm for rank in self._ranks)
        # What a forward exchanges with other ranks, it would exchange with none where it is called for each rank.
        is_plain = not plan.readers and not plan.by_hand
        self._exchanges = self._by_rank and is_plain and any(rank.exchanges for rank in self._ranks)
        # An evaluation that draws its rows may be on some ranks alone.
        self._skips_evaluations = self._makes and any(_counts(rank) != _counts(first) for rank in self._ranks)
        if self._skips_evaluations:
            for rank in self._ranks:
                rank.drawn = [drawn.outside_evaluations() for drawn in rank.drawn]
        self._drawn_in_turn = 0  # how many numbers were drawn, where each micro-batch is one rank's

    def _opened(self, packed: Packed | None) -> Any:
        """Returns a batch, or inputs of a model."""
        try:
            return packed.opened() if packed else None
        except (AttributeError, ImportError, pickle.UnpicklingError) as error:
            self.stop(message("batches_of_unknown_class", error=str(error)))

    @property
    def ranks(self) -> int:
        """How many ranks are replayed."""
        return self._plan.ranks

    @property
    def told_ranks(self) -> int:
        """How many ranks the script is told that there are."""
        return self._plan.told_ranks

    def why_not(self) -> Message | None:
        """Returns why this record cannot be replayed; None where it may be."""
        if why := next((rank.why_not for rank in self._ranks if rank.why_not), None):
            return why
        first, in_turn = self._ranks[0], self._plan.in_turn
        if any(len(rank.forwards) != len(first.forwards) for rank in self._ranks):
            return message("forwards_differ_between_ranks")
        if any(list(map(len, rank.passes)) != list(map(len, first.passes)) for rank in self._ranks):
            return message("batches_differ_between_ranks")
        # Where the model's inputs are fed, numbers that are drawn for them outside of torch do not matter.
        if (self._from_loader or self._makes) and any(rank.outside for rank in self._ranks):
            return message("draws_outside_torch")
        counts = _counts(first)
        if (self._from_loader or self._makes) and any(_counts(rank) != counts for rank in self._ranks):
            return message("draws_differ_between_ranks")
        # What is drawn before the first forward pass alone is no micro-batch's.
        by_batch = counts if self._from_loader else counts[1:]
        if in_turn and any(by_batch) and (self._from_loader or (self._makes and not _draws_each(counts)[0])):
            return message("draws_cannot_be_played_in_turn")
        return message("several_forwards_in_a_micro_batch") if in_turn and first.several else None

    def attach(self) -> None:
        """Patches forwards and loaders; comes before the recorder's patches, so that it sees what is fed."""
        if why := self.why_not():
            self.stop(why)
        hooks = self._recorder.hooks
        make_meshes_of_one_rank(hooks, self._one_rank.refuse_mesh if self._one_rank else lambda ranks: None)
        refuse_groups_of_several(hooks, self._refuse_group)
        leave_losses_whole(hooks)
        allow_batches_of_all_ranks(hooks)
        if self.told_ranks > 1 and not self._one_rank:
            tell_ranks(hooks, self.told_ranks)
        if self.told_ranks == 1:
            make_trainers_of_one_rank(hooks)
        if self._hand:
            self._one_rank.attach(hooks) if self._one_rank else make_groups_of_one_rank(hooks)
            self._gathered.attach(hooks)
        if self._plan.small_gradients:
            make_gradients_small(hooks)
        change_run(hooks, self._plan.changes)
        self._recorder.on_restart = self._forget
        patch_training_forwards(hooks, self._forward)
        patch_loaders(hooks, self._next, self._length)
        patch_autograd(hooks, lambda _: None if in_backward() else self._end_draws(), lambda: None)
        # Else the model's inputs are fed, or there are none.
        if self._makes or (self._from_loader and not self._plan.in_turn):
            patch_draws(hooks, self._draw)
            patch_numpy_draws(hooks, self._draw)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self._recorder.before_engine_step = self._before_engine_step
        self._recorder.after_engine_step = self._after_engine_step

    def _forget(self) -> None:
        """Sets the counters of forward passes back to zero, where the recording began anew."""
        self._forwards = self._events = self._draws = 0
        self._loaded.clear()

    def _refuse_group(self, ranks: int) -> NoReturn:
        self.stop(message("group_of_other_ranks", ranks=ranks))

    def stop(self, why: Message, needs_turns: bool = False) -> NoReturn:
        """Ends the replay: it cannot be judged."""
        self._leave(ReplayRecord(why, self._feed, needs_turns, held=self._hand.held if self._hand else {}))

    def result(self) -> ReplayRecord:
        """Returns how far from the ranks' weights the replay has ended."""
        steps = self._recorder.steps
        if not steps:
            return ReplayRecord(message("no_step_in_one_process"), self._feed)
        return ReplayRecord(
            feed=self._feed,
            micro_batches=len(steps[0].micro_batches),
            distances=self._distances(),
            base_rates=self._base_rates,
            recorded_base_rates=self._ranks[0].base_rates,
            held=self._hand.held if self._hand else {},
            means=self._by_rank and not self._exchanges and any(forward.loss for forward in self._ranks[0].forwards),
            lone_log_softmax=WholeLosses.lone > 0,
            gathers_cut=self._gathered.used,
            adds_numbers=bool(self._one_rank and self._one_rank.adds_numbers),
        )

    @property
    def _feed(self) -> Feed:
        return "in turn" if self._plan.in_turn else "by rank" if self._by_rank else "whole"

    @property
    def _may_need_turns(self) -> bool:
        """Whether what does not fit may fit with each rank's micro-batch in turn."""
        return not self._recorder.steps and not self._plan.in_turn

    def _place(self, number: int) -> tuple[int, int]:
        """Returns (rank, number) of what the ranks have in the place of the replay's batch or forward `number`."""
        ranks = len(self._ranks)
        return (number % ranks, number // ranks) if self._plan.in_turn else (0, number)

    def _distances(self) -> dict[str, Distance]:
        size = sum(gradient.numel() for gradient in self._first.values())
        squares = sum(float((gradient**2).sum()) for gradient in self._first.values())
        least = LEAST_OF_FIRST_GRADIENT * (squares / size) ** 0.5 if size else 0.0
        distances = {}
        for name, gradient in self._first.items():
            moves = ~(gradient.abs() <= least)  # NaN, too
            start, end = self._start[name].double(), self._end[name].double()
            replayed = values_held(self._recorder.parameters.by_name[name]).cpu().double().view(start.shape)
            moved, off = (end - start)[moves], (replayed - end)[moves]
            distances[name] = Distance(float((moved**2).sum()), float((off**2).sum()))
        return distances

    # Batches and forwards

    def _next(self, iterator: Any, read: Callable[[Any], Any]) -> Any:
        """Returns the ranks' batch instead of what the iterator would read."""
        first = self._ranks[0]
        # A loader that no rank has trained with reads its own batches.
        if self._recorder.skips or iterator._samestep not in first.numbers:
            self._inside = True
            try:
                return read(iterator)
            finally:
                self._inside = False
        number = first.numbers.index(iterator._samestep)
        rank, place = self._place(getattr(iterator, "_samestep_read", 0))
        iterator._samestep_read = getattr(iterator, "_samestep_read", 0) + 1
        if place >= len(first.passes[number]):
            if first.ended[number]:
                raise StopIteration
            self.stop(message("more_batches_in_one_process"), needs_turns=self._may_need_turns)
        self._read_since, self._draws = True, 0
        if self._plan.in_turn:
            return self._opened(self._ranks[rank].passes[number][place])
        return self._joined([self._opened(data.passes[number][place]) for data in self._ranks])

    def _joined(self, parts: list[Any]) -> Any:
        try:
            return joined(parts)
        except CannotJoin as error:
            self.stop(error.why)

    def _length(self, loader: Any, length: int) -> int:
        lengths = self._ranks[0].lengths
        rank_length = lengths[self._lengths_asked] if self._lengths_asked < len(lengths) else length
        self._lengths_asked += 1
        if rank_length is None:
            return length
        return rank_length * len(self._ranks) if self._plan.in_turn else rank_length

    def _forward(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._recorder.skips:
            return call(*args, **kwargs)
        self._end_draws()
        self._compare_calls(more_to_come=True)
        self._load(module)
        rank, place = self._place(self._forwards)
        self._forwards += 1
        if place >= len(self._ranks[0].forwards):
            self.stop(message("more_forwards_in_one_process"), needs_turns=self._may_need_turns)
        ranks = [self._ranks[rank]] if self._plan.in_turn else self._ranks
        forwards = [data.forwards[place] for data in ranks]
        args, kwargs, order = self._fed(forwards, args, kwargs)
        self._inside = True
        try:
            if self._by_rank:
                return self._call_by_rank(call, module, args, kwargs, forwards=forwards, order=order)
            set_random_states(forwards[0].random_states)
            return call(*args, **kwargs)
        finally:
            self._inside = False

    def _fed(self, forwards: list[Forward], args: Any, kwargs: Any) -> tuple[Any, Any, RowOrder]:
        """Returns the inputs of a forward: those of the ranks, which the script has from its loader, makes itself, or
        is given here; and which rows of the ranks they are. Ends the replay where it has others."""
        first, sizes = forwards[0], [len(forward.rows) for forward in forwards]
        order = RowOrder(sizes, [*range(sum(sizes))])
        inputs = [self._opened(forward.inputs) for forward in forwards]
        if self._makes:
            # What it has drawn before the first forward is not known: its data may be others than a rank's.
            same_states = self._forwards > 1 or _are_equal(random_states(), first.random_states)
            is_known = same_states and is_joined((args, kwargs), inputs)
            if not is_known or (self._by_rank and len(rows_of((args, kwargs))) != sum(sizes)):
                self.stop(message("makes_other_batches"), needs_turns=self._may_need_turns)
        elif not self._from_loader:
            args, kwargs = moved_like(self._joined(inputs), (args, kwargs))
        else:
            rows = rows_of((args, kwargs))
            is_first = not self._recorder.steps
            near = COMPUTED_ROWS_APART_FIRST if is_first else COMPUTED_ROWS_APART_LATER
            known = order_of_rows(rows, [f.rows for f in forwards])
            if known is None and all(given is not None for given in inputs):
                known = order_of_values((args, kwargs), inputs, near)
            if known is None and self._are_pieces(self._forwards - 1, (args, kwargs)):
                known = order
            if known is None and is_first and is_rescaled_by_rank((args, kwargs), inputs):
                self.stop(message("rows_normalised_by_own_rank"))
            if known is not None and not known.keeps_ranks:
                self.stop(message("replay_reads_other_rows"))
            if known is None and (len(rows) != sum(sizes) or not first.computed):
                self.stop(message("replay_reads_other_rows"))
            order = known or order
        return args, kwargs, order

    def _are_pieces(self, place: int, inputs: Any) -> bool:
        """Returns whether a forward's inputs are what the ranks of the replicas were given pieces of."""
        if not self._hand:
            return False
        given = [self._opened(data.forwards[place].inputs) for data in self._all_ranks]
        return all(inputs is not None for inputs in given) and are_pieces(inputs, given)

    def _call_by_rank(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        args: Any,
        kwargs: Any,
        *,
        forwards: list[Forward],
        order: RowOrder,
    ) -> Any:
        """Calls a model with each rank's rows and random state, inside of one forward of its wrapper."""
        if attribute_of(module, "_orig_mod") is not None:
            self.stop(message("compiled_model_not_played_by_rank"))
        inner = _unwrapped(module)
        if self._exchanges:
            with ModulesByRank(forwards, order, self.stop).attached(inner):
                return call(*args, **kwargs)
        before, forward = inner.__dict__.get("forward"), inner.forward
        lists = lists_of_rows(args, sum(order.sizes))
        frozen = [(name, parameter) for name, parameter in named_parameters_in(inner) if not parameter.requires_grad]
        buffers_and_frozen = [*named_buffers_in(inner), *frozen]
        states = [(n, state, state._version) for n, state in buffers_and_frozen if n.split(".")[-1] not in STATISTICS]

        def by_rank(*args: Any, **kwargs: Any) -> Any:
            outputs = []
            for rank, recorded in enumerate(forwards):
                set_random_states(recorded.random_states)
                outputs.append(forward(*order.rows_of_rank(args, rank), **order.rows_of_rank(kwargs, rank)))
                # A rank draws fewer numbers for its piece than one process for the whole tensor.
                if self._divided and torch_state() != recorded.after:
                    self.stop(message("draws_for_pieces"))
                # The next rank would see a queue, an average, … that the ranks before it have changed.
                if changed := [name for name, state, version in states if state._version != version]:
                    self.stop(message("forward_changes_state", name=changed[0]))
            return order.joined_outputs(outputs, lists)

        inner.__dict__["forward"] = by_rank  # Fabric's wrapper would hand an attribute on
        try:
            return call(*args, **kwargs)
        finally:
            # Lightning exchanges it during the call.
            if inner.__dict__.get("forward") is by_rank:
                del inner.__dict__["forward"]
                if before is not None:
                    inner.__dict__["forward"] = before

    def _load(self, module: nn.Module) -> None:
        """Loads the recorded first weights into what is seen for the first time."""
        parameters = self._recorder.parameters.by_name
        new = {name: parameter for name, parameter in parameters.items() if name not in self._loaded}
        if not new:
            return
        if self._hand:
            self._put_together(self._hand, new)
        for name, parameter in new.items():
            shape = getattr(parameter, "ds_shape", parameter.shape)
            if name not in self._start or self._start[name].shape != shape:
                self.stop(message("other_parameter_in_one_process", parameter=name))
        self._loaded |= {*new}
        with torch.no_grad():
            for name, parameter in new.items():
                load_whole(parameter, self._start[name])
            engine = self._recorder.engine
            if engine and not refresh_engine(engine):
                self.stop(message("engine_keeps_other_weights", kind=type(engine.optimizer).__name__))
            for name, buffer in buffers(module).items():
                if f"buffer {name}" in self._start and self._start[f"buffer {name}"].shape == buffer.shape:
                    buffer.copy_(self._start[f"buffer {name}"])

    def _put_together(self, hand: WholeWeights, new: dict[str, nn.Parameter]) -> None:
        """Puts the weights of a model that the script divides itself together."""
        if missing := hand.add(new):
            hand.held.clear()  # names that match by chance tell nothing
            self.stop(message("weights_not_put_together", parameter=missing))
        self._start, self._end = (states | hand.whole(n) for states, n in ((self._start, START), (self._end, END)))
        self._recorder.parameters.cut = hand.cut

    # Random numbers beside the model

    def _draw(self, call: Any) -> Tensor:
        """Returns the numbers that the ranks together have drawn, in place of those that the script draws outside of
        the model."""
        numbers: Tensor = call()
        # In turn there are more events than on a rank; later ones are as the last.
        drawn = [rank.drawn[min(self._events, len(rank.drawn) - 1)] for rank in self._ranks if rank.drawn]
        is_late = not drawn or (self._events >= len(self._ranks[0].drawn) and not self._plan.in_turn)
        if self._inside or self._recorder.skips or is_late or (drawn[0].after_read and not self._read_since):
            return numbers
        if drawn[0].places_only and not are_places(numbers):
            return numbers
        if self._skips_evaluations and not torch.is_grad_enabled():
            return numbers
        if self._plan.in_turn:
            return self._given(call, numbers, self._drawn_of_rank(numbers))
        self._draws += 1
        # A draw after the last one of the event is in no list.
        if self._draws > len(drawn[0]):
            return numbers
        following = self._ranks[0].forwards[min(self._forwards, len(self._ranks[0].forwards) - 1)]
        parts = [of_rank.values[self._draws - 1] for of_rank in drawn]
        return self._given(call, numbers, joined_draws(parts, numbers.shape, rows=len(following.rows)))

    def _given(self, call: Any, numbers: Tensor, value: Tensor | None) -> Tensor:
        """Returns recorded numbers in place of those that were drawn, in the same tensor where they have its shape."""
        if value is not None and value.shape == numbers.shape:
            with torch.no_grad():
                numbers.copy_(value)
            return numbers
        is_in_place = any(given is numbers for given in (*call.args, *call.keywords.values()))
        if value is None or is_in_place:
            self.stop(message("draws_for_a_whole_batch", shape=str(tuple(numbers.shape))))
        return value.to(numbers.device)

    def _drawn_of_rank(self, numbers: Tensor) -> Tensor | None:
        """Returns the numbers of the rank whose micro-batch is drawn, of which each has as many draws."""
        each, beforehand = _draws_each(_counts(self._ranks[0]))
        number, self._drawn_in_turn = self._drawn_in_turn - beforehand, self._drawn_in_turn + 1
        if number < 0 or not each:
            return numbers
        rank, place = self._place(number // each)
        values = [numbers for drawn in self._ranks[rank].drawn for numbers in drawn.values]
        at = beforehand + place * each + number % each
        value = values[at] if at < len(values) else numbers
        return value if value.shape == numbers.shape else None

    def _end_draws(self) -> None:
        """Ends the draws before a forward or a backward pass."""
        if self._recorder.skips:
            return
        counts = _counts(self._ranks[0])
        wanted = counts[self._events] if self._events < len(counts) else 0
        if (self._from_loader or self._makes) and not self._plan.in_turn and self._draws < wanted:
            self.stop(message("draws_differ_in_one_process"))
        self._events, self._draws, self._read_since = self._events + 1, 0, False

    # Steps

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Takes the first gradients; steps at the recorded rates, as the replay's own are judged apart."""
        if self._recorder.skips:
            return
        if not self._recorder.engine:
            self._begin_step(optimizer)
        step, groups = len(self._recorder.steps), self._groups[-1]
        if step < len(self._plan.rates) and len(self._plan.rates[step]) == len(groups):
            for group, rate in zip(groups, self._plan.rates[step]):
                _set_rate(group, rate)

    def _begin_step(self, optimizer: Optimizer) -> None:
        """Begins a step, of which an engine makes several of its optimizer."""
        step, groups = len(self._recorder.steps), optimizer.param_groups
        self._first |= self._gradients()  # of several optimizers each steps for the first time
        momenta = self._ranks[0].momenta
        # A schedule changes these settings, and may depend on the ranks.
        if len(set(map(repr, momenta.values()))) > 1 and len(momenta.get(step, ())) == len(groups):
            for group, recorded in zip(groups, momenta[step]):
                group.update(recorded)
        self._rates.append([float(group["lr"]) for group in groups])
        self._groups.append(groups)

    def _gradients(self) -> dict[str, Tensor]:
        """Returns the gradients of parameters that have had none before."""
        new = {name: p for name, p in self._recorder.parameters.by_name.items() if name not in self._first}
        if self._recorder.engine:
            gradients = raw_engine_gradients(self._recorder.engine, new)
            return {name: gradients[name].cpu().double().view(self._start[name].shape) for name in gradients}
        return {name: block_of(p.grad).cpu().double() for name, p in new.items() if p.grad is not None}

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._recorder.skips:
            return
        for group, rate in zip(self._groups[-1], self._rates[-1]):
            _set_rate(group, rate)
        if not self._recorder.engine:
            self._end_step()

    def _end_step(self, taken: bool = True) -> None:
        self._rates.pop()
        groups, step = self._groups.pop(), len(self._recorder.steps)
        if not taken or not self._recorder.parameters.are_known:
            return
        if not self._recorder.engine:
            self._first |= self._gradients()  # of a closure, which may also be the first to use the model
        if not self._rates:
            self._compare_calls()
            self._base_rates.append([float(group.get("initial_lr", group["lr"])) for group in groups])
            self._compare_micro_batches(step)

    def _before_engine_step(self, optimizer: Any) -> None:
        if not self._recorder.skips:
            self._begin_step(optimizer)

    def _after_engine_step(self, optimizer: Any, taken: bool) -> None:
        if not self._recorder.skips:
            self._end_step(taken)

    def _compare_calls(self, more_to_come: bool = False) -> None:
        """Ends the replay where a closure is called another number of times: what follows would be fed otherwise."""
        step, calls = len(self._recorder.steps), self._recorder.window.calls
        recorded = self._plan.calls[step] if step < len(self._plan.calls) else calls
        if calls > recorded and more_to_come:
            self.stop(message("closure_called_more_often", step=step, calls=calls, recorded=recorded))
        if calls > recorded or (calls < recorded and not more_to_come):
            self.stop(message("closure_called_otherwise", step=step, calls=calls, recorded=recorded))

    def _compare_micro_batches(self, step: int) -> None:
        """Ends the replay where a step has other micro-batches than the ranks'."""
        if step >= len(self._plan.micro_batches):
            return
        count, ranks = len(self._recorder.window.micro_batches), len(self._ranks)
        recorded, in_turn = self._plan.micro_batches[step], self._plan.in_turn
        if not recorded or count == recorded * (ranks if in_turn else 1):
            return
        figures = {"micro_batches": count, "step": step, "ranks": ranks, "recorded": recorded}
        why = message("other_micro_batches_in_one_process", **figures)
        if self._makes and count == recorded:
            why = message("makes_other_batches")  # rank 0's alone
        turns = count == recorded * ranks and not in_turn and not step
        self._leave(ReplayRecord(why, self._feed, turns, count if not step else -1))


def _counts(rank: ReplayData) -> list[int]:
    """Returns how many random numbers a rank has drawn before each forward and backward pass, beside the model."""
    return [len(drawn) for drawn in rank.drawn]


def _draws_each(counts: Sequence[int]) -> tuple[int, int]:
    """Returns (how many draws belong to each micro-batch, how many before the first one belong to none). The first is 0
    where that is not the same number throughout."""
    each = {*filter(None, counts[1:])}
    return (min(each), counts[0] - min(each)) if len(each) == 1 and counts[0] >= min(each) else (0, 0)


def _unwrapped(module: Any) -> Any:
    """Returns the module inside of DataParallel, DistributedDataParallel and Fabric's wrapper."""
    if is_a(module, DataParallel | DistributedDataParallel):
        return _unwrapped(module.module)
    inside = module._modules.get("_forward_module")  # of Fabric
    return _unwrapped(inside) if inside is not None else module


def _weights(folder: Path, name: str, ranks: list[ReplayData]) -> Weights:
    """Returns the whole weights: rank 0's, and of a sharded one the blocks of all ranks, put together."""
    places = [rank.places for rank in ranks]
    arrays = [read_arrays(folder, rank, name) for rank in range(len(ranks) if places[0] else 1)]
    weights = {key: torch.from_numpy(array) for key, array in arrays[0].items()}
    for key, (shape, _) in places[0].items():
        if key in weights:
            parts = [(torch.from_numpy(array[key]), of_rank[key][1]) for of_rank, array in zip(places, arrays)]
            weights[key] = whole_of(parts, shape)
    return weights


def _are_equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def _set_rate(group: Any, rate: Any) -> None:
    if is_a(group["lr"], Tensor):
        group["lr"].fill_(float(rate))
    else:
        group["lr"] = rate
