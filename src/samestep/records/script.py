"""The record of a foreign script, and the results of `samestep check`, which judges it without a reference.

A rank writes `rankR.json`, a ScriptRecord, and `rankR.stepS.npz`, the gradients of step S: see ARRAYS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeVar

from samestep.records.beside_steps import EvaluationSeen, GroupSeen, RandomSeen, SaveSeen
from samestep.records.replay import ReplayPlan
from samestep.records.results import Divergence

PLAN = "script-plan.json"  # a worker knows by this name what to do
STEP = "step{}"  # the name of a step's arrays
# Of each parameter NAME: the gradient that this rank computed in the micro-batch M, before any reduction; the one that
# lay in .grad before clipping (only where something is clipped); and the one that the optimizer took.
LOCAL, UNCLIPPED, TAKEN = "local {} {}", "unclipped {}", "taken {}"
CLOSURES = "closures-rank{}.json"
COMPRESSED = "compressed"  # among a step's dtypes: a communication hook hands on less than the gradients
BUCKETS = 4096  # elements of an array at most: a larger tensor is added up into so many sums, with random signs
MICRO_BATCHES = 8  # of a step that are kept apart; all later ones are added to the last
A = TypeVar("A")  # an array


def of_kind(arrays: Mapping[str, A], kind: str) -> dict[str, A]:
    """Returns parameter -> its array, of a step's arrays of one kind: UNCLIPPED or TAKEN."""
    prefix = kind.format("")
    return {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}


@dataclass(frozen=True)
class ScriptPlan:
    """What each rank of a launch runs. script: the path of a Python file. steps: of the optimizer, to record.

    A script of '' is what a command gives to each rank, of which it must start `ranks`; rank 0 completes the plan.
    keep: whether to keep what a replay needs. replay: what this launch replays, in one process. module: whether the
    script is a module's name, as for python -m.
    """

    IS_PRIVATE: ClassVar = True  # it holds settings or arguments as they were given

    out: str
    started_at: float
    script: str
    arguments: tuple[str, ...] = ()
    steps: int = 8
    keep: bool = False
    replay: ReplayPlan | None = None
    ranks: int = 0
    module: bool = False


@dataclass(frozen=True)
class LossSeen:
    """One term of a loss that was given to backward(). weight: the factor with which it enters.

    reduction: 'mean', 'sum' or 'unknown' (then the weight is not known either). count: how many values or targets the
    term reduces. kind: the node of the graph that reduces them.
    """

    weight: float
    reduction: str
    count: int = 0
    kind: str = ""


@dataclass(frozen=True)
class MicroSeen:
    """One micro-batch: the forward passes up to a backward(). rows: digests of the rows that the model received.

    losses: the terms of the loss. passes: the numbers of the passes over loaders whose batches it used.
    """

    rows: list[str]
    losses: list[LossSeen] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class ClipSeen:
    """One call of clip_grad_norm_ or clip_grad_value_. after: how many micro-batches of its step had been computed.

    parameters: how many were clipped, of `of` that have a gradient. limit: the norm allowed, None for a clipped value.
    """

    after: int
    parameters: int
    of: int
    limit: float | None


@dataclass(frozen=True)
class StepSeen:
    """One step of an optimizer.

    optimizer: its number, in the order of their first steps. rates: of each parameter group. schedules: last_epoch of
    each of its schedulers. cleared: micro-batches whose gradients zero_grad() removed since the last step. scale: the
    gradient scaler's factor. weights: digest of each parameter after the step. moved: those that the step has changed.
    sharded: whether some are sharded in a way that is not judged. shards: parameters each element of which is on one
    rank; their arrays UNCLIPPED and TAKEN are this rank's part, and the sum over the ranks is the whole's. computed:
    the dtypes in which autocast has computed. held: parameters that are in the optimizer's groups. lost: those of which
    the rank has computed a gradient, where the optimizer took none at all. calls: of the optimizer's closure. splits:
    whether the ranks compute parts of the same rows, as those of a tensor-parallel model do.
    """

    optimizer: int
    micro: list[MicroSeen]
    rates: list[float]
    schedules: list[int]
    clips: list[ClipSeen]
    cleared: int
    scale: float | None
    weights: Mapping[str, int]
    moved: list[str]
    dtypes: list[str] = field(default_factory=list)
    sharded: bool = False
    shards: list[str] = field(default_factory=list)
    computed: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    calls: int = 0
    splits: bool = False


@dataclass(frozen=True)
class ClosuresSeen:
    """How often one rank has called its optimizer's closure in each step. done: how many steps have ended."""

    calls: list[int]
    done: int


@dataclass(frozen=True)
class PassSeen:
    """One pass over a DataLoader: an epoch, or what was seen of it.

    loader: the loader's number. length: of its dataset; None where it has none. batches: the indices of each batch that
    was read, None for a dataset without indices. rest: the indices that this pass would have read after these; None
    where it is not known. digests: of each row read, one of each of its tensors. trained: micro-batches that used it.
    dataset: a digest of what the dataset holds for its first, middle and last row; '' where that is not known.
    """

    loader: int
    length: int | None
    batch_size: int | None
    batches: list[list[int] | None]
    rest: list[int] | None
    digests: list[list[str]]
    trained: int
    sampler: str = ""
    dataset: str = ""


@dataclass(frozen=True)
class ScriptRecord:
    """What one rank recorded of a script.

    start: digest of each parameter at the first training forward. ended: 'steps' (all that were asked), or 'itself'.
    libraries: those with which the script trains. record_s: seconds that recording took; step_s: the seconds of
    each step with it. epochs_set: calls of DistributedSampler.set_epoch. notes: what the recorder could not see.
    """

    rank: int
    size: int
    start: Mapping[str, int]
    steps: list[StepSeen]
    passes: list[PassSeen]
    ended: Literal["steps", "itself"]
    libraries: list[str]
    record_s: float
    step_s: list[float]
    epochs_set: int = 0
    buffers: Mapping[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    evaluations: list[EvaluationSeen] = field(default_factory=list)
    randoms: RandomSeen = field(default_factory=RandomSeen)
    groups: Mapping[str, GroupSeen] = field(default_factory=dict)
    saves: list[SaveSeen] = field(default_factory=list)


Answer = Literal["right", "differs", "unknown", "warning"]  # a warning is of a finding alone: it may be intended


@dataclass(frozen=True)
class Finding:
    """The answer to one question about a script. sentence: what was seen, or why it cannot be judged."""

    question: str
    answer: Answer
    sentence: str
    divergence: Divergence | None = None


@dataclass(frozen=True)
class CheckResults:
    """The results of `samestep check`. answer: 'differs' where one finding differs; 'unknown' where none does, and one
    of the questions that a proof needs has no answer. steps: how many were recorded on every rank."""

    script: str
    arguments: list[str]
    ranks: int
    steps: int
    answer: Answer
    findings: list[Finding]
    first_divergence: Divergence | None
    record_share: float
    folder: str
    notes: list[str] = field(default_factory=list)
    command: str = ""


@dataclass(frozen=True)
class DiffResults:
    """The results of `samestep diff`: as CheckResults, of the records in the folder `second` against `first`.

    resumed_at: steps of the first before the checkpoint with which the second began."""

    first: str
    second: str
    steps: int
    answer: Answer
    findings: list[Finding]
    first_divergence: Divergence | None
    notes: list[str] = field(default_factory=list)
    resumed_at: int = 0


def question_of(results: CheckResults | DiffResults) -> str:
    """Returns the question whose answer is the first divergence; '' where there is none."""
    first = results.first_divergence
    return next((each.question for each in results.findings if first and each.divergence == first), "")
