"""Whether the ranks draw random numbers of their own."""

from __future__ import annotations

from samestep.proof.script.updates import Ranks, common_steps, many
from samestep.records.script import Finding

QUESTION = "random numbers"
SAME = (
    "every rank draws the same random numbers in the model (dropout masks): the generators have one state on {} from "
    "step {} on. By nature no error in the mean, but the ranks' noise is not independent: seed by rank after the model "
    "is built, and restore each rank's own state on resume"
)
WORKERS = "; the loaders' workers begin with one seed on all ranks, so that random augmentation repeats over them"


def randoms(ranks: Ranks) -> Finding:
    """Answers whether dropout's masks differ over ranks, by the state of torch's generators where they are drawn."""
    if len(ranks) == 1:
        return Finding(QUESTION, "right", "one rank")
    draws = [rank.randoms.draws for rank in ranks]
    steps = [step for step in common_steps(ranks) if all(len(each) > step and each[step] for each in draws)]
    workers = [rank.randoms.workers for rank in ranks]
    shared = WORKERS * (bool(workers[0]) and all(each == workers[0] for each in workers))
    if not steps:
        return Finding(QUESTION, "right", "the model draws none in its training forward passes" + shared)
    if any(step.sharded for rank in ranks for step in rank.steps):
        return Finding(QUESTION, "unknown", "ranks that share a sharded layer must draw the same, others must not")
    for step in steps:
        states = [each[step] for each in draws]
        if same := [rank for rank, state in enumerate(states) if states.count(state) > 1]:
            which = "all ranks" if len(same) == len(ranks) else f"ranks {', '.join(map(str, same))}"
            return Finding(QUESTION, "warning", SAME.format(which, step) + shared)
    said = f"the ranks draw from different states in {many(len(steps), 'step')}"
    return Finding(QUESTION, "right", said + shared)
