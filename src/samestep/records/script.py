"""The record of a foreign script, which `samestep check` judges without a reference.

A rank writes `rankR.json`, a ScriptRecord, and `rankR.stepS.npz`, the gradients of step S: see LOCAL. For a replay, in
which one process takes the steps again, fed with what all ranks have read, it also keeps `rankR.kept.pt`, and rank 0
the weights before the first and after the last step. The replay writes `rank0.json` as any rank, and `replay.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from samestep.message import Message
from samestep.records.call_site import CallRecord
from samestep.records.divided_models import HeldPiece, ModuleRecord, TalkRecord

PLAN = "script-plan.json"  # a worker knows by this name what to do
STEP = "step{}"  # the name of a step's arrays
# Of each parameter NAME: the gradient that this rank computed in the micro-batch M, before any reduction; the one that
# lay in .grad before clipping (only where something is clipped); and the one that the optimizer took.
LOCAL, UNCLIPPED, TAKEN = "local {} {}", "unclipped {}", "taken {}"
# The same sums of the weights before the first step, and after each one, where the plan asks for them.
BEFORE, AFTER = "before {}", "after {}"
AVERAGE = "average {}"  # names of the tensors that no optimizer moves: at first, and where they have changed
LOCAL_PIECE = "local {}"  # of the gradients that the rank computes in all micro-batches
ENGINE_CLIPPING = "gradient_clipping"  # among the settings of an engine's optimizer: the norm allowed
CLOSURES = "closures-rank{}.json"
UNFINISHED = "unfinished-rank{}.json"  # the ScriptRecord of a rank that has failed
COMPRESSED = "compressed"  # among a step's dtypes: a communication hook hands on less than the gradients
BUCKETS = 4096  # elements of an array at most: a larger tensor is added up into so many sums, with random signs
MICRO_BATCHES = 8  # of a step that are kept apart; all later ones are added to the last
NO_LOADER = -1  # stands for the number of a pass
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # BatchNorm's buffers: each rank's own by design

REPLAYED = "replay.json"
REPLAY_FOLDER = "replay"  # of the replay's records, in the folder of the recording's
KEPT = "rank{}.kept.pt"
START, END = "start", "end"  # the names of rank 0's arrays
# How the ranks' batches are fed: as one; as one that goes through the model rank by rank; or one rank's at a time.
Feed = Literal["whole", "by rank", "in turn"]
A = TypeVar("A")  # an array


def of_kind(arrays: Mapping[str, A], kind: str) -> dict[str, A]:
    """Returns parameter -> its array, of a step's arrays of one kind: UNCLIPPED or TAKEN."""
    prefix = kind.format("")
    return {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}


@dataclass(frozen=True)
class ReplayPlan:
    """What to replay. record: the folder of the recording, of so many ranks. work: the folder to run in.

    in_turn: whether each micro-batch is one rank's, for a script that accumulates as many more on fewer ranks. rates,
    micro_batches, calls: the recorded learning rates, and numbers of micro-batches and of calls of a closure, of each
    step. alone: steps that rank 0 has taken before those of all ranks, which are not fed. readers: the ranks whose rows
    are fed, one of each replica; none: all. told_ranks: how many ranks the script is told that there are, which is as
    many as a replica has where it cannot run as one, or as all have. by_hand: the ranks of each replica of a model that
    the script divides itself, if it does: its whole weights are put together of theirs. small_gradients: whether they
    are made so small that nothing clips them.
    """

    record: str
    ranks: int
    work: str
    rates: list[list[float]]
    micro_batches: list[int]
    in_turn: bool = False
    calls: list[int] = field(default_factory=list)
    alone: int = 0
    readers: list[int] = field(default_factory=list)
    told_ranks: int = 1
    by_hand: list[list[int]] = field(default_factory=list)
    small_gradients: bool = False


@dataclass(frozen=True)
class ScriptPlan:
    """The plan of a launch of a script. script: the path of a Python file. steps: of the optimizer, to record.

    A script of '' is what a command gives to each rank, of which it must start `ranks`; rank 0 completes the plan.
    keep: whether to keep what a replay needs. replay: what this launch replays, in one process. module: whether the
    script is a module's name, as for python -m. weights: whether to record sums of the weights after each step. seed:
    of what the script does not seed, on rank 0, and one more on each next rank; None: from the system.
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
    weights: bool = False
    seed: int | None = None


# The steps


@dataclass(frozen=True)
class LossRecord:
    """One term of a loss that was given to backward(). weight: the factor with which it enters.

    reduction: 'mean', 'sum' or 'unknown' (then the weight is not known either). count: how many values or targets the
    term reduces, without those that a mask sets to zero. kind: the node of the graph that reduces them. factors: those
    of which the weight is the product. classes: among which each target is told apart.
    """

    weight: float
    reduction: str
    count: int = 0
    kind: str = ""
    factors: list[float] = field(default_factory=list)
    classes: int = 0


@dataclass(frozen=True)
class MicroBatchRecord:
    """One micro-batch: the forward passes up to a backward(). rows: digests of the rows that the model received.

    losses: the terms of the loss. passes: the numbers of the passes over loaders whose batches it used. forwards: how
    many there were. value: of the loss that was given to backward(), None where that is no scalar.
    """

    rows: list[str]
    losses: list[LossRecord] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    forwards: int = 0
    value: float | None = None
    in_evaluation_mode: bool = False
    """Whether all of its forward passes were in evaluation mode, as those of a model whose eval() was called."""


@dataclass(frozen=True)
class ClipRecord:
    """One call of a function of torch.nn.utils that clips. after: how many micro-batches of its step had been computed.

    parameters: how many were clipped, of those `with_gradient`. limit: the norm allowed, None for a clipped value.
    """

    after: int
    parameters: int
    with_gradient: int
    limit: float | None


@dataclass(frozen=True)
class GroupSettings:
    """What an optimizer's group of parameters is moved by: its numbers, as lr, momentum and weight_decay."""

    parameters: list[str]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class StepRecord:
    """One step of an optimizer.

    optimizer: its number, in the order of their first steps. rates: of each parameter group. schedules: last_epoch of
    each of its schedulers. cleared: micro-batches whose gradients zero_grad() removed since the last step. scale: the
    gradient scaler's factor. weights: digest of each parameter after the step. moved: those that the step has changed.
    sharded: whether some are sharded in a way that is not judged. shards: parameters each element of which is on one
    rank; their arrays UNCLIPPED and TAKEN are this rank's part, and the sum over the ranks is the whole's. computed:
    the dtypes in which autocast has computed. held: parameters that are in the optimizer's groups. lost: those of which
    the rank has computed a gradient, where the optimizer took none at all. calls: of the optimizer's closure. splits:
    whether the ranks compute parts of the same rows, as those of a tensor-parallel model do. changed: digests of what
    is not trained, where they have changed since the step before. updates: how often each network that is not trained
    has changed since then; early: those that have between the backward pass and the step. foreign: tensors of the
    optimizer's groups that are no parameters of the models. cut_gathers: places in the losses' graphs where what was
    gathered from the ranks has a gradient for this rank's part alone. own_statistics: whether the loss of the first
    step normalises what the model returns of this rank's rows by their own deviation. late_clips: clippings since the
    step before whose gradients were removed before any backward pass: of gradients that a step had taken already.
    unawaited: reductions (async_op=True) whose tensor was changed before they were awaited, or that the step did
    not wait for. uncleared: parameters whose gradient still holds what the optimizer's step before has taken.
    settings: of the optimizer's groups, of the first step and of those that have others than the step before; empty
    where they are as before.
    """

    optimizer: int
    micro_batches: list[MicroBatchRecord]
    rates: list[float]
    schedules: list[int]
    clips: list[ClipRecord]
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
    changed: Mapping[str, int] = field(default_factory=dict)
    updates: Mapping[str, int] = field(default_factory=dict)
    early: list[str] = field(default_factory=list)
    foreign: int = 0
    cut_gathers: int = 0
    own_statistics: bool = False
    late_clips: int = 0
    unawaited: int = 0
    uncleared: list[str] = field(default_factory=list)
    settings: list[GroupSettings] = field(default_factory=list)


@dataclass(frozen=True)
class ClosureRecord:
    """How often one rank has called its optimizer's closure in each step. done: how many steps have ended."""

    calls: list[int]
    done: int


@dataclass(frozen=True)
class PassRecord:
    """One pass over a DataLoader: an epoch, or what was seen of it.

    loader: the loader's number. length: of its dataset; None where it has none. batches: the indices of each batch that
    was read, None for a dataset without indices. rest: the indices that this pass would have read after these; None
    where it is not known. digests: of each row read, one of each of its tensors. trained: micro-batches that used it.
    dataset: a digest of what the dataset holds for its first, middle and last row; '' where that is not known. workers:
    processes that read for it.
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
    workers: int = 0


# A rank's part of a model that is divided over ranks

Kind = Literal["shard", "replicate", "partial"]


@dataclass(frozen=True)
class MeshRecord:
    """A device mesh over which tensors are divided. names, shape: of its dimensions. ranks: the last dimension goes
    fastest."""

    names: list[str]
    shape: list[int]
    ranks: list[int]


@dataclass(frozen=True)
class PieceRecord:
    """A rank's piece of one tensor, a DTensor. mesh: its number. kinds: in each dimension of the mesh, what the ranks
    along it hold: other elements, the same ones, or what is to be added up. offset, shape: of the piece. data: how many
    of the mesh's dimensions, the first ones, are FSDP's, along which ranks train other rows."""

    mesh: int
    kinds: list[Kind]
    offset: list[int]
    shape: list[int]
    data: int = 0


@dataclass(frozen=True)
class StageRecord:
    """A stage of a pipeline that a rank holds. index: its number, of so many stages. micro_batches: of its schedule, of
    this class. ranks: of the pipeline's group. model: digests of the whole model that the stage is cut out of, where
    the rank has it when it makes the stage."""

    index: int
    stages: int
    micro_batches: int
    schedule: str
    ranks: list[int]
    model: Mapping[str, int] = field(default_factory=dict)


# Beside the steps


@dataclass(frozen=True)
class EvaluationRecord:
    """One pass over a DataLoader that is evaluated and not trained. number: of the pass, among all; NO_LOADER for
    forward passes of other data, which are kept only where the model has BatchNorm's statistics. step: how many
    optimizer steps had been taken. buffers: digests of the evaluated model's BatchNorm statistics.
    collectives: the operations called from its first forward up to the next training forward. rows: digests of the
    model's inputs, of forward passes of other data that return a loss.
    """

    number: int
    step: int
    buffers: Mapping[str, int] = field(default_factory=dict)
    collectives: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)


UntrainedKind = Literal["frozen", "buffer"]


@dataclass(frozen=True)
class UntrainedRecord:
    """A tensor that no optimizer moves. network: the module that it is part of. start: its digest when it was first
    seen. called: whether a forward pass of its network was seen; else it is a copy of the model. in_part: whether a
    step has changed some of its elements and not others, as a queue's."""

    kind: UntrainedKind
    network: str
    start: int
    called: bool = True
    in_part: bool = False


@dataclass(frozen=True)
class FetchDraws:
    """What a process that reads for a loader draws in its second batch. worker: its number, 0 for the rank's process.
    states: digests of the generators from which it draws for its rows, before that batch."""

    worker: int
    states: list[str]


@dataclass(frozen=True)
class RandomRecord:
    """Random generators. states: 'torch', 'numpy' and 'python' -> the digest of the state at the first training
    forward. draws: of each step, the digest of torch's state before its first training forward, '' where that forward
    draws no random number. workers: the seed from which a loader's workers take theirs, of each pass that has workers.
    beside: of each step, the digest of a generator from which numbers for its rows are drawn between the loader and the
    model, '' where none are. fetched: what the datasets draw.
    """

    states: Mapping[str, str] = field(default_factory=dict)
    draws: list[str] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    fetched: list[FetchDraws] = field(default_factory=list)


@dataclass(frozen=True)
class GroupRecord:
    """The collectives of one process group, in their order. ranks: its members, empty where that is not known.

    calls: as 'all_reduce [16, 8] float': operation, shapes of the inputs, type. first: the number of the first one that
    is known, as older ones are forgotten.
    """

    ranks: list[int]
    calls: list[str]
    first: int = 1


@dataclass(frozen=True)
class SaveRecord:
    """A file that torch.save has written. file: its real path. step: how many steps had been taken by then."""

    file: str
    step: int


@dataclass(frozen=True)
class LoopRecord:
    """A loop of the user's around an optimizer's step. rounds: how often it goes round, None if not known."""

    file: str
    line: int
    rounds: int | None


@dataclass(frozen=True)
class ScheduleRecord:
    """A schedule of torch.optim.lr_scheduler. length: how often it is to be advanced; None where it has no end.
    kind: its class. values: the numbers that it was made with."""

    number: int
    length: int | None
    kind: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ScriptRecord:
    """What one rank recorded of a script.

    start: digest of each parameter at the first training forward. ended: 'steps' (all that were asked), or 'itself'.
    libraries: those with which the script trains. record_s: seconds that recording took; step_s: the seconds of
    each step with it. epochs_set: calls of DistributedSampler.set_epoch. notes: what the recorder could not see.
    calls: the lines of the user's code that call torch. alone: steps that the rank has taken before those, while the
    others took none. rollouts: (step, forwards without gradients in training mode before it). ties:
    (embedding, output layer) pairs of trained parameters that begin with the same values. still: the share of elements
    of 16-bit weights that no step has moved, of those with a gradient; None where there are none. loops: those around
    the first step, the innermost first; none where code of a library lies between them. follows: network that begins as
    a copy of trained weights -> how far it has moved, as a share of how far these have. meshes, pieces: of a model that
    is divided otherwise than by FSDP over all ranks: of its parameters, and of the arrays LOCAL (without a number),
    UNCLIPPED and TAKEN. divides_inputs: whether the ranks of a replica are given pieces of its inputs.
    reduces_in_forward: whether the script has called all_reduce in a training forward. stages: that the rank holds of
    a pipeline of torch.distributed.pipelining. talks: of the groups whose ranks tell
    each other what a model computes. shapes: of the parameters in `start`. uniform: those of them each element of which
    begins with the same value, as zeros. modules: of the first training forward.
    functions: that the graphs of the first step's losses are made of.
    """

    rank: int
    size: int
    start: Mapping[str, int]
    steps: list[StepRecord]
    passes: list[PassRecord]
    ended: Literal["steps", "itself"]
    libraries: list[str]
    record_s: float
    step_s: list[float]
    epochs_set: int = 0
    buffers: Mapping[str, int] = field(default_factory=dict)
    notes: list[Message] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    randoms: RandomRecord = field(default_factory=RandomRecord)
    groups: Mapping[str, GroupRecord] = field(default_factory=dict)
    saves: list[SaveRecord] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)
    untrained: Mapping[str, UntrainedRecord] = field(default_factory=dict)
    alone: int = 0
    rollouts: list[tuple[int, int]] = field(default_factory=list)
    ties: list[tuple[str, str]] = field(default_factory=list)
    still: float | None = None
    loops: list[LoopRecord] = field(default_factory=list)
    schedules: list[ScheduleRecord] = field(default_factory=list)
    follows: Mapping[str, float] = field(default_factory=dict)
    meshes: list[MeshRecord] = field(default_factory=list)
    pieces: Mapping[str, PieceRecord] = field(default_factory=dict)
    divides_inputs: bool = False
    reduces_in_forward: bool = False
    stages: list[StageRecord] = field(default_factory=list)
    talks: list[TalkRecord] = field(default_factory=list)
    shapes: Mapping[str, list[int]] = field(default_factory=dict)
    uniform: list[str] = field(default_factory=list)
    modules: list[ModuleRecord] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)


# The replay in one process


@dataclass(frozen=True)
class Distance:
    """Of one parameter's elements that the first gradient moves: the squares of how far the recorded steps have moved
    them, and of how far the replay's end from there."""

    moved: float
    off: float


@dataclass(frozen=True)
class ReplayRecord:
    """How a replay went. why_not: the reason for which it cannot be judged; None where it can.

    needs_turns: whether it is to be repeated with each rank's micro-batch in turn. micro_batches: of its first step; -1
    where that did not end. base_rates: of each step, the rates from which a schedule starts; recorded: the same of the
    ranks. means: whether losses of the ranks were averaged, as their mean is computed inside of the model. held: of a
    model that the script divides itself, parameter of one process -> what each rank of a replica holds of it.
    lone_log_softmax: whether the script, inside of loss_parallel(), has a log_softmax that no nll_loss follows.
    gathers_cut: whether ranks that share out a model gather what has a gradient by collectives that hand none back.
    adds_numbers: whether a script that is told of all ranks adds up single numbers over ranks of which some share out a
    model, and some are replicas of each other: over one process that is a sum of copies.
    """

    why_not: Message | None = None
    feed: Feed = "whole"
    needs_turns: bool = False
    micro_batches: int = -1
    distances: Mapping[str, Distance] = field(default_factory=dict)
    base_rates: list[list[float]] = field(default_factory=list)
    recorded_base_rates: list[list[float]] = field(default_factory=list)
    means: bool = False
    held: Mapping[str, list[HeldPiece]] = field(default_factory=dict)
    lone_log_softmax: bool = False
    gathers_cut: bool = False
    adds_numbers: bool = False
