"""Calls a model once for the rows of all ranks, and those of its parts once for each rank that treat a rank's rows by
themselves: BatchNorm and dropout.

A model whose forward exchanges tensors with the other ranks, as for a loss over all rows, cannot be called for each
rank alone: it would see that rank's rows where it saw all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from samestep.job.foreign import attribute_of, is_a, parts_in
from samestep.message import Message, message
from samestep.recorder.batches import RowOrder
from samestep.recorder.random_numbers import random_states, set_random_states, torch_state
from samestep.recorder.replay_saver import Forward, normalises_rows_of_a_rank


def treats_rows_of_a_rank(part: nn.Module) -> bool:
    """Returns whether a module's output for a row depends on the rank on which it is."""
    drops = is_a(part, _DropoutNd) and bool(attribute_of(part, "training"))
    return drops or normalises_rows_of_a_rank(part)


class ModulesByRank:
    """Calls parts of a model rank by rank, inside of one forward. stop: ends the replay with a reason."""

    def __init__(self, forwards: Sequence[Forward], order: RowOrder, stop: Callable[[Message], Any]) -> None:
        self._forwards, self._order, self._stop = forwards, order, stop
        self._states = [forward.random_states for forward in forwards]

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Replaces the forward of these parts; at the end each rank must have drawn what it has drawn in the
        recording."""
        parts = [part for part in parts_in(model) if treats_rows_of_a_rank(part)]
        before = [part.__dict__.get("forward") for part in parts]
        for part in parts:
            part.__dict__["forward"] = self._by_rank(part.forward)
        try:
            yield
        finally:
            for part, forward in zip(parts, before):
                del part.__dict__["forward"]
                if forward is not None:
                    part.__dict__["forward"] = forward
        for states, recorded in zip(self._states, self._forwards):
            set_random_states(states)
            if torch_state() != recorded.after:
                self._stop(message("forward_draws_and_exchanges"))

    def _by_rank(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def by_rank(rows: Tensor, *args: Any, **kwargs: Any) -> Any:
            lists, rest = divmod(len(rows) if rows.dim() else 0, len(self._order.places))
            if rest or not lists:
                self._stop(message("forward_draws_and_exchanges"))
            outputs = []
            for rank, states in enumerate(self._states):
                set_random_states(states)
                own = [self._order.rows_of_rank(part, rank) for part in rows.chunk(lists)]
                outputs.append(forward(torch.cat(own), *args, **kwargs))
                self._states[rank] = random_states()
            return self._order.joined_outputs(outputs, lists)

        return by_rank
