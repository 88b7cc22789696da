"""Judges what the ranks do beside their steps: random numbers, collectives, and files. See evaluation.py, too."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from samestep.judge.findings import Ranks, common_steps, differs, first_apart
from samestep.message import Message, message
from samestep.records.findings import Finding, Question
from samestep.records.script import GroupRecord

WORLD = "0"  # torch's name of the default group
ALIKE = ("all_reduce", "allreduce", "broadcast", "reduce")  # collectives whose inputs have one shape on all ranks


# Random numbers


def randoms(ranks: Ranks) -> Finding:
    """Judges whether random numbers differ over ranks: in the model, for its rows, and in the datasets."""
    found = _in_model(ranks)
    return found if found.answer == "warning" else _repeated_noise(ranks) or found


def _repeated_noise(ranks: Ranks) -> Finding | None:
    """Finds generators from which several ranks, or several workers of a loader, draw for their rows alike."""
    for step in common_steps(ranks):
        states = [rank.randoms.beside[step] if len(rank.randoms.beside) > step else "" for rank in ranks]
        if same := [rank for rank, state in enumerate(states) if state and states.count(state) > 1]:
            return Finding("random numbers", "warning", message("ranks_repeat_noise", ranks=same, step=step))
    readers: dict[str, set[tuple[int, int]]] = defaultdict(set)  # state -> (rank, worker)
    for rank, record in enumerate(ranks):
        for fetched in record.randoms.fetched:
            for state in fetched.states:
                readers[state].add((rank, fetched.worker))
    for known in readers.values():
        rank = min(known)[0]
        if len(workers := sorted(worker for number, worker in known if number == rank)) > 1:
            return Finding("random numbers", "warning", message("workers_repeat_noise", rank=rank, workers=workers))
        if len(same := sorted({number for number, _ in known})) > 1:
            return Finding("random numbers", "warning", message("datasets_of_ranks_repeat_noise", ranks=same))
    return None


def _in_model(ranks: Ranks) -> Finding:
    """Judges whether dropout's masks differ over ranks, by the state of torch's generators where they are drawn."""
    question: Question = "random numbers"
    if len(ranks) == 1:
        return Finding(question, "right", message("one_rank"))
    draws = [rank.randoms.draws for rank in ranks]
    steps = [step for step in common_steps(ranks) if all(len(states) > step and states[step] for states in draws)]
    seeds = [rank.randoms.workers for rank in ranks]
    one_seed = bool(seeds[0]) and all(workers == seeds[0] for workers in seeds)
    workers = message("loader_workers_share_a_seed") if one_seed else None
    if not steps:
        return Finding(question, "right", message("model_draws_no_random_numbers", workers=workers))
    if any(step.sharded for rank in ranks for step in rank.steps):
        return Finding(question, "unknown", message("sharded_layers_share_random_numbers"))
    for step in steps:
        states = [of_rank[step] for of_rank in draws]
        if same := [rank for rank, state in enumerate(states) if states.count(state) > 1]:
            cause = message("ranks_draw_the_same_random_numbers", ranks=same, step=step, workers=workers)
            return Finding(question, "warning", cause)
    return Finding(question, "right", message("ranks_draw_their_own_random_numbers", steps=len(steps), workers=workers))


# Collectives


def collectives(ranks: Ranks) -> Finding:
    """Judges whether the ranks of each process group have called the same collectives, as far as all have come."""
    question: Question = "collectives"
    names = list(dict.fromkeys(name for rank in ranks for name in rank.groups))
    if len(ranks) == 1:
        return Finding(question, "right", message("one_rank"))
    if not names:
        return Finding(question, "unknown", message("no_collectives_recorded"))
    count = 0
    for name in names:
        members = {rank: record.groups[name] for rank, record in enumerate(ranks) if name in record.groups}
        if not _are_one_group(name, members, ranks):
            continue
        if difference := _first_difference([*members.values()]):
            number, calls = difference
            apart = next(place for place, call in enumerate(calls) if _compared(call) != _compared(calls[0]))
            return differs(
                question,
                "collective",
                message("collectives_in_another_order"),
                rank=[*members][apart],
                expected=message("collective_as_on_rank", call=calls[0], number=number, group=name, rank=min(members)),
                found=calls[apart],
            )
        count += min(len(group.calls) for group in members.values())
    return Finding(question, "right", message("collectives_in_the_same_order", collectives=count))


def _are_one_group(name: str, members: Mapping[int, GroupRecord], ranks: Ranks) -> bool:
    """Returns whether these are the records of one group; of groups that were closed only the world's is known."""
    complete = all(group.ranks == [*members] for group in members.values())
    return complete or (name == WORLD and len(members) == len(ranks))


def _first_difference(groups: Sequence[GroupRecord]) -> tuple[int, list[str]] | None:
    """Returns the number of the first call that is not the same, and the ranks' calls."""
    first = max(group.first for group in groups)
    lists = [group.calls[first - group.first :] for group in groups]
    for number, calls in enumerate(zip(*lists), first):
        if len({_compared(call) for call in calls}) > 1:
            return number, [*calls]
    return None


def _compared(call: str) -> str:
    """Returns the part of a call that must be the same on all ranks: of most operations the name, as a scatter's inputs
    are on one rank alone. The shape of a number is the same alone and in a list."""
    name = call.partition(" ")[0]
    return call.replace("[1]", "[]") if name in ALIKE else name


# Files


def saves(ranks: Ranks) -> Finding:
    """Judges whether each file that torch.save writes is written by one rank."""
    writers: dict[str, dict[int, int]] = defaultdict(dict)  # file -> rank -> the step
    for rank, record in enumerate(ranks):
        for save in record.saves:
            writers[save.file][rank] = save.step
    shared = {file: steps for file, steps in writers.items() if len(steps) > 1}
    if shared:
        file, steps = min(shared.items(), key=lambda file_and_steps: min(file_and_steps[1].values()))
        first = min(steps.values())
        cause = message("ranks_write_one_file", ranks=[*steps], file=PurePath(file).name, step=first)
        return Finding("saves", "warning", cause)
    if apart := _saved_apart(ranks):
        return Finding("saves", "warning", apart)
    said = message("files_of_one_rank_each", files=len(writers)) if writers else message("no_file_saved")
    return Finding("saves", "right", said)


def _saved_apart(ranks: Ranks) -> Message | None:
    """Returns a finding where each rank writes its own files, whose names differ in numbers alone, at different
    steps."""
    kinds: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))  # kind -> rank -> steps
    for rank, record in enumerate(ranks):
        for save in record.saves:
            kinds[re.sub(r"\d+", "#", PurePath(save.file).name)][rank].add(save.step)
    for kind, steps in kinds.items():
        if (step := first_apart(steps)) is not None:
            savers = [rank for rank in steps if step in steps[rank]]
            return message("ranks_save_at_different_steps", ranks=savers, step=step, file=kind)
    return None
