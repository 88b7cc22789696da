"""Judges whether the tensors that no optimizer moves stay the same on all ranks: frozen networks, moving averages,
buffers, queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from samestep.bounds import FOLLOWS
from samestep.judge.findings import Ranks, common_steps, differs, digest, rank_apart
from samestep.message import Message, message
from samestep.records.findings import Answer, Finding, Question
from samestep.records.script import ScriptRecord, UntrainedKind

QUESTION: Question = "frozen weights"
# Warnings about tensors that may change the gradient, as a replay decides -> the finding where it does.
DECIDED = {
    "buffer_begins_apart": "buffer after the step",
    "queue_not_gathered": "buffer after the step",
    "buffer_of_own_rows": "buffer after the step",
    "gather_without_gradient": "gradient",
}
OF_AVERAGES = ("ema", "average", "momentum", "moving", "shadow", "encoder_k", "key_encoder")  # in a network's name


def untrained(ranks: Ranks) -> list[Finding]:
    """Answers 'frozen weights', and warns of buffers that are each rank's own."""
    return [frozen_weights(ranks), *buffers(ranks)]


def frozen_weights(ranks: Ranks) -> Finding:
    """Judges whether frozen networks and moving averages are the same on all ranks after each step, and follow the
    weights once a step."""
    names = _shared(ranks, "frozen")
    if not names:
        return Finding(QUESTION, "right", message("no_frozen_weights"))
    for step, states in _states(ranks, names):
        weights = [rank.steps[step].weights for rank in ranks]
        if any(of_rank != weights[0] for of_rank in weights):
            return Finding(QUESTION, "unknown", message("frozen_weights_follow_others", step=step))
        if apart := [name for name in names if len({state[name] for state in states}) > 1]:
            return _apart(ranks, step, apart, states)
    moved = {name for rank in ranks for step in rank.steps for name in step.changed if name in names}
    warned = _average(ranks, {ranks[0].untrained[name].network for name in moved}) or _never_follows(
        ranks, names, moved
    )
    if warned:
        return Finding(QUESTION, "warning", warned)
    steps = len(common_steps(ranks))
    still = len(names) - len(moved)
    said = message("frozen_weights_are_the_same", names=len(names), steps=steps, still=still or None)
    return Finding(QUESTION, "right", said)


def _apart(ranks: Ranks, step: int, apart: list[str], states: list[Mapping[str, int]]) -> Finding:
    """Returns the finding about weights that some ranks have changed at a step, while others have not, or to other
    values."""
    name = apart[0]
    first = ranks[0].untrained[name]
    changed = [rank for rank, record in enumerate(ranks) if name in record.steps[step].changed]
    fields = {"weight": name, "network": first.network, "apart": len(apart), "step": step}
    cause = message("frozen_weights_change_apart", **fields)
    if len(changed) < len(ranks):
        cause = message("frozen_weights_change_on_some_ranks", ranks=changed, **fields)
    # The copy may be rank 0's business, which alone saves it.
    if not any(rank.untrained[name].called for rank in ranks):
        often = max(sum(name in after.changed for after in rank.steps) for rank in ranks)
        if 2 * often < len(ranks[0].steps):  # the best weights so far
            return Finding(QUESTION, "right", message("copy_of_some_ranks", network=first.network))
        return Finding(QUESTION, "warning", message("copy_is_not_the_same_on_all_ranks", cause=cause))
    digests = [state[name] for state in states]
    return differs(
        QUESTION,
        "frozen weights after the step",
        cause,
        step=step,
        tensor=name,
        rank=rank_apart(digests),
        expected=message("same_digest_on_all_ranks"),
        found=[digest(value) for value in digests],
    )


def _average(ranks: Ranks, networks: set[str]) -> Message | None:
    """Returns what is wrong with the steps at which networks change; None where nothing is."""
    steps = ranks[0].steps
    for network in sorted(networks):
        # Before the first step there is nothing to average yet.
        often = [(step.updates.get(network, 0), len(step.micro_batches)) for step in steps[1:]]
        if often and all(updates == micro_batches > 1 for updates, micro_batches in often):
            return message("average_updated_at_each_micro_batch", network=network, updates=often[0][0])
        if all(network in step.early for step in steps if step.updates.get(network)):
            return message("average_updated_before_step", network=network)
    return None


def _never_follows(ranks: Ranks, names: list[str], moved: set[str]) -> Message | None:
    """Returns a finding about a network that begins as a copy of trained weights and never changes, though it is a
    moving average: its name says so, or the script writes to it without changing it."""
    for network, weights in _copies(ranks, names).items():
        words = any(word in " ".join([network, *weights]).lower() for word in OF_AVERAGES)
        written = sum(step.updates.get(network, 0) > 0 for step in ranks[0].steps[1:])
        stays = written > 1 and ranks[0].follows.get(network, 1.0) < FOLLOWS
        if (words and not moved.intersection(weights)) or stays:
            return message("average_never_updated", network=network, steps=len(ranks[0].steps))
    return None


def copies_that_stay(ranks: Ranks) -> list[str]:
    """Returns the networks that begin as copies of trained weights, and that no step changes."""
    names = _shared(ranks, "frozen")
    moved = {name for rank in ranks for step in rank.steps for name in step.changed}
    return [network for network, weights in _copies(ranks, names).items() if not moved.intersection(weights)]


def _copies(ranks: Ranks, names: list[str]) -> dict[str, list[str]]:
    """Returns the networks that begin as copies of trained weights, with their weights."""
    first, networks = ranks[0], dict[str, list[str]]()
    trained = {first.start[name] for name in first.steps[0].weights if name in first.start}
    for name in names:
        networks.setdefault(first.untrained[name].network, []).append(name)
    return {
        network: weights
        for network, weights in networks.items()
        if all(first.untrained[name].start in trained for name in weights)
    }


def buffers(ranks: Ranks) -> list[Finding]:
    """Warns of a buffer that is each rank's own, other than BatchNorm's statistics; nothing where there is none."""
    names = _shared(ranks, "buffer")
    for step, states in _states(ranks, names):
        for name in names:
            if len({state[name] for state in states}) == 1:
                continue
            begins_apart = len({rank.untrained[name].start for rank in ranks}) > 1
            said = message("buffer_of_own_rows", buffer=name, step=step)
            if any(rank.untrained[name].in_part for rank in ranks):
                said = message("queue_not_gathered", buffer=name, step=step)
            if begins_apart:
                said = message("buffer_begins_apart", buffer=name, step=step)
            return [Finding("buffers", "warning", said)]
    return []


def with_effects(findings: Sequence[Finding], replay_findings: Sequence[Finding]) -> list[Finding]:
    """Returns the findings, with what a replay says of the warnings: whether the gradient depends on the tensors that
    they name."""
    answers = {finding.question: finding.answer for finding in replay_findings}
    return [_with_effect(finding, answers.get("replayed gradient")) for finding in findings]


def _with_effect(finding: Finding, replayed: Answer | None) -> Finding:
    quantity, fields = DECIDED.get(finding.message.id), finding.message.fields
    if quantity is None or finding.answer != "warning" or replayed not in ("right", "differs"):
        return finding
    if replayed == "right":
        return replace(finding, answer="right", message=message("warning_without_effect", warning=finding.message))
    expected, found = message("that_of_one_process"), message("another_on_the_ranks")
    tensor = fields.get("buffer")
    return differs(
        finding.question, quantity, finding.message, step=fields["step"], tensor=tensor, expected=expected, found=found
    )


def _shared(ranks: Ranks, kind: UntrainedKind) -> list[str]:
    """Returns the names of what all ranks hold of a kind."""
    first, *other_ranks = ranks
    if len(ranks) == 1 or any(step.splits for step in first.steps):
        return []
    names = [name for name, record in first.untrained.items() if record.kind == kind]
    if kind == "frozen":  # tensors that begin apart are told as initial weights
        names = [name for name in names if all(_start(rank, name) == _start(first, name) for rank in other_ranks)]
    return [name for name in names if all(name in rank.untrained for rank in other_ranks)]


def _start(rank: ScriptRecord, name: str) -> int | None:
    return rank.untrained[name].start if name in rank.untrained else None


def _states(ranks: Ranks, names: list[str]) -> list[tuple[int, list[Mapping[str, int]]]]:
    """Returns (step, [rank] name -> digest after it) of each step that all ranks have recorded."""
    states: list[Mapping[str, int]] = [{name: rank.untrained[name].start for name in names} for rank in ranks]
    after = []
    for step in common_steps(ranks):
        changes = [rank.steps[step].changed for rank in ranks]
        states = [{name: of_rank.get(name, state[name]) for name in names} for state, of_rank in zip(states, changes)]
        after.append((step, states))
    return after
