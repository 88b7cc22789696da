"""Judges ranks that step apart on purpose, each with its own gradients, and bring their weights together from time to
time: local SGD, DiLoCo, federated rounds, gossip. Their law is that of what they bring together: see meetings.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from samestep.bounds import BY_NUMBERS_OF_ROWS, TOLD_APART
from samestep.judge.findings import Ranks, common_steps, differs
from samestep.judge.fit import Array, is_times
from samestep.judge.gradients import uncleared
from samestep.judge.loss_weight import loss_weight
from samestep.judge.meetings import Meeting, Shares, meetings
from samestep.judge.step_gradients import StepGradients
from samestep.message import Message, message
from samestep.records.findings import Finding, Question
from samestep.records.record import Record

QUESTION: Question = "weights"
OF_STEPS_APART = ("gradients_are_own_between_meetings", "gradients_of_steps_apart_unexplained")  # ids of 'gradient'


@dataclass(frozen=True)
class StepsApart:
    """Ranks that step apart. meetings: at which they hand weights on to each other."""

    ranks: Ranks
    record: Record
    meetings: Sequence[Meeting]

    @classmethod
    def of(cls, ranks: Ranks, record: Record, *, is_meant: bool) -> StepsApart | None:
        """Returns the ranks, where they are declared or seen to step apart on purpose; None of any others.

        is_meant: whether the script declares that they do.
        """
        weights = [[rank.steps[step].weights for rank in ranks] for step in common_steps(ranks)]
        if not any(of_rank != of_step[0] for of_step in weights for of_rank in of_step):
            return None
        # An outer step is meant to be one on all ranks' weights.
        met = [meeting for meeting in meetings(ranks, record) if meeting.joins() or (is_meant and meeting.gradients)]
        return cls(ranks, record, met) if met or is_meant else None

    def findings(self) -> list[Finding]:
        """Answers 'gradient', 'loss weight' and 'weights'."""
        return [*self._gradients(), self.weights()]

    def _gradients(self) -> list[Finding]:
        """Judges whether each step takes a rank's own gradients, or those of all ranks, and what the losses weigh."""
        scales = []
        for step in common_steps(self.ranks):
            if finding := uncleared(self.ranks, step):
                return [finding]
            if not any(rank.steps[step].micro_batches for rank in self.ranks):
                # An outer optimizer's, which the meeting shows.
                continue
            gradients = StepGradients.read(self.record, self.ranks, step)
            if not gradients.names:
                continue
            is_own = gradients.are_own() or gradients.are_own_clipped()
            if gradients.not_finite() or not is_own:
                return [Finding("gradient", "unknown", message("gradients_of_steps_apart_unexplained", step=step))]
            as_mean = gradients.as_mean() if gradients.not_mean else gradients
            scales.append(loss_weight(as_mean, self.ranks, step))
        if not scales:
            return [Finding("gradient", "unknown", message("no_gradient_seen"))]
        right = Finding("gradient", "right", message("gradients_are_own_between_meetings", steps=len(scales)))
        wrong = next((scale for scale in scales if scale.answer == "differs"), None)
        return [right, wrong or next((scale for scale in scales if scale.answer != "right"), scales[-1])]

    def weights(self) -> Finding:
        """Judges each meeting, until one is not right."""
        if apart := self._settings_apart():
            return apart
        if not self.meetings:
            return Finding(QUESTION, "unknown", message("no_meeting_seen"))
        past, said = list[Array](), list[Message]()
        for meeting in self.meetings:
            finding = self._met_at_other_steps(meeting) or self._left_out(meeting) or self._buffers_left_out(meeting)
            finding = finding or (_outer(meeting) if meeting.gradients else self._written(meeting, past))
            if finding.answer != "right":
                return finding
            said.append(finding.message)
            way = meeting.way()
            past = past if way is None else [*past, way]
        steps = [meeting.steps[0] for meeting in self.meetings]
        return Finding(QUESTION, "right", message("weights_meet", steps=steps, how=said[-1]))

    def _settings_apart(self) -> Finding | None:
        """Finds an optimizer that has other settings on some rank: outer steps are then other ones."""
        for step in common_steps(self.ranks):
            values = [[group.values for group in rank.steps[step].settings] for rank in self.ranks]
            for rank, of_rank in enumerate(values):
                names = {name for one, first in zip(of_rank, values[0]) for name in one if one[name] != first.get(name)}
                if names - {"lr"}:
                    name = min(names - {"lr"})
                    cause = message("optimizers_of_ranks_have_other_settings", rank=rank, setting=name)
                    expected, found = values[0][0].get(name), of_rank[0].get(name)
                    return differs(QUESTION, name, cause, step=step, rank=rank, expected=expected, found=found)
        return None

    def _met_at_other_steps(self, meeting: Meeting) -> Finding | None:
        cause = why_met_apart(meeting.steps)
        if cause is None:
            return None
        rank, found, expected = (cause.fields[name] for name in ("rank", "step", "first"))
        what, step = "steps before the weights are brought together", min(expected, found)
        return differs(QUESTION, what, cause, step=step, rank=rank, expected=expected, found=found)

    def _left_out(self, meeting: Meeting) -> Finding | None:
        """Finds a rank that keeps all its weights, though others have taken these in; or parameters that no rank brings
        together."""
        step, size = meeting.steps[0], len(self.ranks)
        kept = [rank for rank in range(size) if all(rank in meeting.idle(name) for name in meeting.names)]
        if 0 < len(kept) < size and not meeting.is_alike and not _rest_without(meeting, kept):
            cause = message("average_not_loaded_by_some_ranks", ranks=kept, step=step)
            return _of_weights(cause, meeting, rank=kept[0], found=message("weights_of_the_rank_alone"))
        left_out = [name for name in meeting.names if name not in meeting.changed]
        if left_out:
            fields = {"left_out": len(left_out), "parameters": len(meeting.names), "step": step}
            cause = message("parameters_left_out_of_averaging", **fields)
            own = message("weights_of_the_rank_alone")
            return _of_weights(cause, meeting, rank=1, found=own, tensor=left_out[0])
        return None

    def _buffers_left_out(self, meeting: Meeting) -> Finding | None:
        """Finds buffers that stay each rank's own, where others that its rows have moved are brought together."""
        first = [rank.buffers for rank in self.ranks]
        moved = [name for name in first[0] if len({of_rank.get(name) for of_rank in first}) > 1]
        begun = [rank.steps[step].begun for rank, step in zip(self.ranks, meeting.steps)]
        apart = [name for name in moved if len({of_rank.get(name) for of_rank in begun}) > 1]
        if not 0 < len(apart) < len(moved):
            return None
        cause = message("buffers_left_out_of_averaging", buffer=apart[0], alike=len(moved) - len(apart))
        return _of_weights(cause, meeting, rank=1, found=message("weights_of_the_rank_alone"), tensor=apart[0])

    def _written(self, meeting: Meeting, past: Sequence[Array]) -> Finding:
        """Judges weights that were written without an outer optimizer of torch."""
        found = [meeting.of_weights(rank, past) for rank in range(len(self.ranks))]
        shares = [of_rank for of_rank in found if of_rank]
        if len(shares) < len(found):
            return _unexplained(meeting)
        if not meeting.is_alike:
            return self._mixed(meeting, shares)
        first = shares[0]
        if first.total < -first.near:
            return _of_weights(message("outer_step_goes_backwards", step=meeting.steps[0]), meeting, found=first.total)
        if missing := first.missing():
            left = [rank for rank in range(len(found)) if rank not in missing]
            fields = {"ranks": left, "step": meeting.steps[0]}
            return _of_weights(message("weights_of_some_ranks_alone", **fields), meeting, found=_rounded(first))
        if is_times(first.base, len(found)) or (first.are_even and is_times(first.total, len(found))):
            return _added_up(meeting, first)
        if abs(first.base - 1) > max(TOLD_APART, first.error):
            return _unexplained(meeting)
        if not first.are_even:
            return self._by_rows(meeting, first)
        is_mean = abs(first.total - 1) <= max(TOLD_APART, first.near)
        said = message("weights_are_the_mean") if is_mean else message("weights_go_towards_the_mean", far=first.total)
        return Finding(QUESTION, "right", said)

    def _by_rows(self, meeting: Meeting, shares: Shares) -> Finding:
        """Judges shares that are not even: those of the rows that each rank has trained on."""
        last = max((other.steps[0] for other in self.meetings if other.steps[0] < meeting.steps[0]), default=0)
        rows = [
            sum(len(batch.rows) for step in rank.steps[last : meeting.steps[0]] for batch in step.micro_batches)
            for rank in self.ranks
        ]
        parts = np.array(rows) / max(1, sum(rows))
        if (abs(shares.of_ranks / shares.total - parts) <= BY_NUMBERS_OF_ROWS * parts).all():
            return Finding(QUESTION, "right", message("weights_are_the_mean_by_rows", rows=rows))
        said = message("ranks_weigh_unequally_in_the_weights", shares=_rounded(shares), step=meeting.steps[0])
        return Finding(QUESTION, "unknown", said)

    def _mixed(self, meeting: Meeting, shares: Sequence[Shares]) -> Finding:
        """Judges weights of which each rank has another mean, as in gossip: what all ranks have together stays."""
        matrix = np.stack([of_rank.of_ranks for of_rank in shares])
        near = max(TOLD_APART, *(of_rank.near for of_rank in shares)) * len(shares)
        wrong = next((of_rank for of_rank in shares if of_rank.base > 1 + near), None)
        if wrong and float(wrong.base) >= 2 - near:
            return _added_up(meeting, wrong)
        if (abs(matrix.sum(0) - 1) > near).any() or (abs(matrix.sum(1) - 1) > near).any():
            return _unexplained(meeting)
        return Finding(QUESTION, "right", message("weights_are_mixed"))


def why_met_apart(steps: Sequence[int]) -> Message | None:
    """Returns why ranks do not meet; None where they do. steps: [rank] before which it brings its weights together."""
    rank = next((rank for rank, step in enumerate(steps) if step != steps[0]), None)
    if rank is None:
        return None
    return message("ranks_meet_at_different_steps", rank=rank, step=steps[rank], first=steps[0])


def _rest_without(meeting: Meeting, kept: Sequence[int]) -> bool:
    """Returns whether other ranks have written weights that hold nothing of those which have kept theirs: not each rank
    meets another one in gossip."""
    others = [rank for rank in range(len(meeting.own)) if rank not in kept]
    shares = [meeting.of_weights(rank) for rank in others]
    return all(of_rank is not None and {*kept} <= {*of_rank.missing()} for of_rank in shares)


def _outer(meeting: Meeting) -> Finding:
    """Judges an outer optimizer's gradients, which are to be the mean way of the ranks, and what is written of its
    step."""
    size, step = len(meeting.own), meeting.steps[0]
    found = [meeting.of_gradient(rank) for rank in range(size)]
    for rank, shares in enumerate(found):
        if shares is None:
            return _unexplained(meeting)
        if shares.total < -shares.near:
            cause = message("outer_step_goes_backwards", step=step)
            return _of_weights(cause, meeting, rank=rank, found=_rounded(shares))
        if missing := shares.missing():
            fields = {"ranks": [other for other in range(size) if other not in missing], "step": step}
            cause = message("weights_of_some_ranks_alone", **fields)
            return _of_weights(cause, meeting, rank=rank, found=_rounded(shares))
        if shares.are_even and is_times(shares.total, size):
            return _added_up(meeting, shares)
        if not shares.are_even or abs(shares.total - 1) > max(TOLD_APART, shares.near):
            said = message("ranks_weigh_unequally_in_the_weights", shares=_rounded(shares), step=step)
            return Finding(QUESTION, "unknown", said)
    for rank, (outer, new) in enumerate(zip(meeting.outer, meeting.new)):
        if any(not np.array_equal(outer[name], new[name]) for name in meeting.names):
            said = message("outer_weights_are_not_loaded", rank=rank, step=step)
            return Finding(QUESTION, "unknown", said)
    return Finding(QUESTION, "right", message("outer_gradient_is_the_mean"))


def _added_up(meeting: Meeting, shares: Shares) -> Finding:
    cause = message("weights_added_up_over_ranks", ranks=len(meeting.own), step=meeting.steps[0])
    return _of_weights(cause, meeting, found=_rounded(shares))


def _unexplained(meeting: Meeting) -> Finding:
    return Finding(QUESTION, "unknown", message("meeting_not_explained", step=meeting.steps[0]))


def _of_weights(
    cause: Message, meeting: Meeting, *, found: object, rank: int | None = None, tensor: str | None = None
) -> Finding:
    mean = message("mean_over_ranks", ranks=len(meeting.own))
    what = "weights that are brought together"
    return differs(QUESTION, what, cause, step=meeting.steps[0], rank=rank, tensor=tensor, expected=mean, found=found)


def _rounded(shares: Shares) -> list[float]:
    return [round(float(share), 4) for share in shares.of_ranks]
