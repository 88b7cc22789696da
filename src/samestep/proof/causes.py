"""Names the usual cause of a difference, in one sentence for each quantity.

A cause is a hint, drawn from the numbers of both sides; the difference itself is the proof.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from samestep.message import as_said
from samestep.proof import gradient_causes
from samestep.proof.trace import Expectation, Trace
from samestep.records.results import Divergence


@dataclass(frozen=True)
class Case:
    """One training, as the reference and as an engine took it."""

    expectation: Expectation
    training: str
    expected: Trace
    observed: Trace

    def divergence(
        self,
        quantity: str,
        expected: Any,
        observed: Any,
        *,
        step: int | None = None,
        tensor: str | None = None,
        rank: int | None = None,
    ) -> Divergence:
        """The divergence of one quantity, with its cause."""
        at = Divergence(self.training, step, quantity, tensor, rank, expected, observed)
        return replace(at, expected=_short(expected), found=_short(observed), cause=as_said(CAUSES[quantity](self, at)))

    @property
    def replicas(self) -> int:
        facts = self.expectation.facts
        return (facts.then or facts.layout).replicas

    def begins_epoch(self, step: int) -> bool:
        """Whether a step is the first of an epoch, and not of the first one."""
        epochs = self.expected.epochs
        return epochs[step] > 0 and step == min(s for s, epoch in epochs.items() if epoch == epochs[step])

    @property
    def uneven(self) -> set[int]:
        """The steps in which the ranks' parts weigh differently."""
        weights: dict[int, set[float]] = {}
        for process in self.expectation.of(self.training).seen:
            of_step: dict[int, float] = {}
            for part in process:
                of_step[part.step] = of_step.get(part.step, 0.0) + part.weight
            for step, weight in of_step.items():
                weights.setdefault(step, set()).add(weight)
        return {step for step, of_ranks in weights.items() if len(of_ranks) > 1}


def _short(value: Any) -> Any:
    """A value to print: no list of one element, and no more than a few elements of a long one."""
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON knows no NaN
    if isinstance(value, list) and len(value) > 8:
        return [*value[:6], f"… {len(value)} in all"]
    return value


def _start(case: Case, at: Divergence) -> str:
    if len(set(case.observed.start)) == 1:
        return "every rank starts from weights that are not the job's: something moved them before the first batch"
    return f"rank {at.rank} starts from other weights: seed the model alike on every rank, or broadcast rank 0's first"


def _indices(case: Case, at: Divergence) -> str:
    if at.step is None:
        return "right in the proof's steps, wrong in a later epoch: its order is that of another epoch"
    step = at.step
    read = [[i for part in process if part.step == step for i in part.indices] for process in case.observed.parts]
    wanted = [i for process in case.expected.parts for part in process if part.step == step for i in part.indices]
    if sum(map(bool, read)) > 1 and all(rows == max(read, key=len)[: len(rows)] for rows in read):
        return "every rank reads the same rows: the sampler does not know its rank"
    everything = [i for rows in read for i in rows]
    if len(everything) > len(wanted) and set(everything) == set(wanted):
        return "the batch is padded: rows are repeated so that every rank gets as many"
    if len(everything) != len(wanted):
        return "a batch of another size: the incomplete last batch is dropped, or the batch size is per rank"
    if case.begins_epoch(step):
        return "right in the first epoch, wrong from the next: the order does not change with the epoch (set_epoch)"
    if sorted(everything) == sorted(wanted):
        return "the step's rows are right together, but shared out over the ranks in another way"
    return "other rows, or the same in another order: another seed or sampler"


def _tensors(case: Case, at: Divergence) -> str:
    if case.begins_epoch(at.step or 0):
        return "right in the first epoch, wrong from the next: the augmentation's key does not know the epoch"
    return (
        "the rows are right, their values are not: normalised or cast twice, "
        "a random augmentation that is not keyed by the sample, or data that each process builds for itself and "
        "differently (a vocabulary, a folder in the system's order)"
    )


def _weight(case: Case, at: Divergence) -> str:
    return "the rows are right, their weights in the mean are not"


def _loss(case: Case, at: Divergence) -> str:
    step, played = at.step or 0, case.expectation.of(case.training)
    if step == 0:
        if at.rank and played.draws:
            return f"rank {at.rank} draws other random numbers, such as another rank's dropout mask"
        return "the same rows and weights give another loss: another input, precision, mode (eval) or random stream"
    if case.training == "user":
        return "right under SGD, wrong under the job's own optimizer: its settings, its state or its parameter groups"
    before = step - 1
    if case.replicas > 1 and before > 0 and before == min(case.uneven, default=None):  # step 0's gradient is right
        return (
            f"the update of step {before} is wrong, the first whose ranks have unequal rows: "
            "averaged per rank instead of per row"
        )
    clipped = [s for s, norm in enumerate(played.norms) if played.clip_norm and norm > played.clip_norm]
    if before == min(clipped, default=None):
        return (
            f"the update of step {before} is wrong, the first that is clipped, and its gradient is right unclipped: "
            "clipped before the reduction, by another norm, or not at all"
        )
    if case.begins_epoch(step):
        return (
            f"right until the epoch's end after step {before}: the mode (eval), the rate or the buffers are not as "
            "before, or its last update is wrong"
        )
    if before == 0 and played.draws:
        return "the first step is right: the second draws other random numbers, such as the same dropout mask again"
    if before == 1:
        return (
            "the first update is right, the second is not: gradients are not cleared, or the optimizer's state "
            "(momentum, weight decay) is off"
        )
    return f"the update of step {before} is wrong though those before are right: check what is special about that step"


def _rate(case: Case, at: Divergence) -> str:
    step = at.step or 0
    ratio = at.found[0] / at.expected[0] if at.expected[0] else float("inf")
    if step == 0:
        if case.replicas > 1 and np.isclose(ratio, case.replicas):
            return f"the learning rate is multiplied by the {case.replicas} ranks"
        return f"the learning rate is {ratio:.3g} times the job's from the start"
    later = case.expectation.of(case.training).rates
    if case.replicas > 1 and case.replicas * step < len(later) and np.allclose(at.found, later[case.replicas * step]):
        return f"the scheduler stepped {case.replicas} times a step, once for each rank"
    return "right at first, wrong later: the scheduler steps at other times than once every step or epoch"


def _steps(case: Case, at: Divergence) -> str:
    return "an optimizer step was left out or taken twice: accumulation, a skipped fp16 step, or a state broadcast"


def _groups(case: Case, at: Divergence) -> str:
    return "the optimizer was built without the job's parameter groups"


def _gradient(case: Case, at: Divergence) -> str:
    return gradient_causes.cause(case.expectation, case.expected, case.observed)


def _parameter(case: Case, at: Divergence) -> str:
    if case.training == "user":
        return "right under SGD, wrong under the job's own optimizer: its settings, its state or its parameter groups"
    return "every loss was right and the last update was not: look at what the engine does after the last step"


def _buffer(case: Case, at: Divergence) -> str:
    tensor = at.tensor or ""
    if tensor.endswith("num_batches_tracked") and at.found > at.expected:
        times = "counted twice" if at.found == 2 * at.expected else f"counted as {at.found / at.expected:.3g}"
        return f"every batch is {times}: a forward pass with BatchNorm is computed again, as checkpointing does"
    for replica in range(1, case.replicas):
        theirs = case.expectation.arrays(case.training, f".buffers{replica}").get(tensor)
        if theirs is not None and np.allclose(theirs, case.observed.state[tensor], rtol=1e-9, atol=0):
            return f"these are rank {replica}'s buffers; the training's are rank 0's"
    return "the buffers are synchronised in another way, or averaged over the ranks"


def _names(case: Case, at: Divergence) -> str:
    return "a wrapper's prefix is left in the names, or weights are missing"


def _coverage(case: Case, at: Divergence) -> str:
    return "samples are seen twice or lost within an epoch"


def _evaluated(case: Case, at: Divergence) -> str:
    if at.tensor == "weight":
        return "the rows are right, their weights in the evaluation's loss are not"
    if at.found > at.expected:
        return "the evaluation is padded: some rows are counted twice"
    return "the evaluation covers a part of the rows: one rank's counts, not the sum over ranks"


def _metric(case: Case, at: Divergence) -> str:
    return "the weights are right and the metric is not: another mode, other buffers, or a mean of the ranks' means"


def _precision(case: Case, at: Divergence) -> str:
    return "the engine trains under autocast without declaring it: its steps are not those of the job's own precision"


def _replicas(case: Case, at: Divergence) -> str:
    return (
        f"after the last step rank {at.rank} has other weights than rank 0 (compared by digests): it left its last "
        "update out, or took another"
    )


CAUSES = {
    "precision": _precision,
    "initial weights": _start,
    "rows": _indices,
    "indices": _indices,
    "tensors received": _tensors,
    "weight": _weight,
    "loss": _loss,
    "learning rate": _rate,
    "optimizer steps": _steps,
    "parameter groups": _groups,
    "first gradient": _gradient,
    "parameter": _parameter,
    "buffer": _buffer,
    "names of the weights": _names,
    "replicas": _replicas,
    "every index once": _coverage,
    "evaluation rows": _evaluated,
    "evaluation": _metric,
}
