"""The record of a foreign script, which `samestep check` judges without a reference.

A rank writes `rankR.json`, a ScriptRecord, and `rankR.stepS.npz`, the gradients of step S: see LOCAL. For a replay, in
which one process takes the steps again, fed with what all ranks have read, it also keeps `rankR.kept.pt`, and rank 0
the weights before the first and after the last step. What a launch is to do, and how a replay went: script_plan.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from samestep.message import Message
from samestep.records.call_site import CallRecord
from samestep.records.divided_models import MeshRecord, ModuleRecord, PieceRecord, StageRecord, TalkRecord
from samestep.records.reports import ReportRecord

STEP = "step{}"  # the name of a step's arrays
# Of each parameter NAME: the gradient that this rank computed in the micro-batch M, before any reduction; the one that
# lay in .grad before clipping (only where something is clipped); and the one that the optimizer took.
LOCAL, UNCLIPPED, TAKEN = "local {} {}", "unclipped {}", "taken {}"
# The same sums of the weights before the first step, and after each one, where the plan asks for them.
BEFORE, AFTER = "before {}", "after {}"
# Of an outer optimizer, which moves copies of the parameters of ranks that step apart: the gradient that it took of the
# copy of a parameter, and the copy after its step. Such ranks have BEFORE and AFTER, too.
OUTER_GRADIENT, OUTER_WEIGHTS = "outer gradient {}", "outer weights {}"
AVERAGE = "average {}"  # names of the tensors that no optimizer moves: at first, and where they have changed
LOCAL_PIECE = "local {}"  # of the gradients that the rank computes in all micro-batches
ENGINE_CLIPPING = "gradient_clipping"  # among the settings of an engine's optimizer: the norm allowed
CLOSURES = "closures-rank{}.json"
UNFINISHED = "unfinished-rank{}.json"  # the ScriptRecord of a rank that has failed
COMPRESSED = "compressed"  # among a step's dtypes: a communication hook hands on less than the gradients
BUCKETS = 4096  # elements of an array at most: a larger tensor is added up into so many sums, with random signs
MICRO_BATCHES = 8  # of a step that are kept apart; all later ones are added to the last
ON_CPUS = "computed_on_cpus"  # the id of the note that CPUs have computed what the script computes on GPUs
NO_LOADER = -1  # stands for the number of a pass
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # BatchNorm's buffers: each rank's own by design
A = TypeVar("A")  # an array


def of_kind(arrays: Mapping[str, A], kind: str) -> dict[str, A]:
    """Returns parameter -> its array, of a step's arrays of one kind: UNCLIPPED or TAKEN."""
    prefix = kind.format("")
    return {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}


# The steps


@dataclass(frozen=True)
class LossRecord:
    """One term of a loss that was given to backward(). The loss is a linear combination of such means and sums."""

    weight: float
    """Factor with which the term enters the loss. NaN where the reduction is unknown."""

    reduction: str
    """'mean', 'sum' or 'unknown'."""

    count: int = 0
    """Number of values or targets that the term reduces, without those that a mask sets to zero or that nll_loss
    ignores. 0: not known."""

    kind: str = ""
    """Name of the autograd node that reduces the values, as 'NllLoss'. '' where the reduction is unknown."""

    factors: list[float] = field(default_factory=list)
    """Factors whose product is `weight`, without those that are 1."""

    classes: int = 0
    """Number of classes among which each target is told apart. 0: none, not known, or classes that have weights."""


@dataclass(frozen=True)
class MicroBatchRecord:
    """One micro-batch: the forward passes up to a backward()."""

    rows: list[str]
    """Digest of each row that the model received."""

    losses: list[LossRecord] = field(default_factory=list)
    """Terms of the loss. Empty where backward() was given no scalar."""

    passes: list[int] = field(default_factory=list)
    """Numbers of the passes over loaders whose batches the micro-batch used, as indices of `ScriptRecord.passes`."""

    forwards: int = 0
    """Number of training forward passes of outermost modules."""

    value: float | None = None
    """Value of the loss that was given to backward(). None: the loss is no scalar, or no backward() was seen."""

    other_inputs: list[str] = field(default_factory=list)
    """Digests of the model's inputs that are no rows, as the nodes of a graph that a batch is about; in the first step
    alone."""

    targets: list[str] = field(default_factory=list)
    """Digests of the targets of the loss, and of what chooses among outputs; in the first step alone."""


@dataclass(frozen=True)
class ClipRecord:
    """One call of a function of torch.nn.utils that clips gradients."""

    after: int
    """Number of micro-batches of the step that were computed before the call."""

    parameters: int
    """Number of parameters with a gradient that the call clipped."""

    with_gradient: int
    """Number of all parameters that had a gradient at the call."""

    limit: float | None
    """Largest norm that the call allows. None: it clips values, not a norm."""

    of_pieces: bool = False
    """Whether the call computes the norm of this rank's pieces alone, of parameters that FSDP's first version shares
    out."""


@dataclass(frozen=True)
class GroupSettings:
    """The numbers by which an optimizer moves one of its groups of parameters."""

    parameters: list[str]
    """Names of the group's parameters."""

    values: Mapping[str, Any]
    """Name of a setting, as 'lr', 'momentum' or 'weight_decay' -> its value."""


@dataclass(frozen=True)
class StepRecord:
    """One step of an optimizer, and the micro-batches whose gradients it took."""

    optimizer: int
    """Number of the optimizer, from 0 in the order of the optimizers' first steps."""

    micro_batches: list[MicroBatchRecord]
    """Micro-batches since the step before whose gradients zero_grad() did not remove."""

    rates: list[float]
    """Learning rate of each parameter group."""

    schedules: list[int]
    """`last_epoch` of each of the optimizer's schedulers when the step ends."""

    clips: list[ClipRecord]
    """Calls that clipped the step's gradients."""

    cleared: int
    """Number of micro-batches since the step before whose gradients zero_grad() removed, and whose rows are in no
    gradient of this step."""

    scale: float | None
    """Factor of the gradient scaler. None: no scaler divided the gradients."""

    weights: Mapping[str, int]
    """Parameter -> its digest after the step. Parameters that are sharded over all ranks have none."""

    moved: list[str]
    """Names of the parameters that the step changed."""

    dtypes: list[str] = field(default_factory=list)
    """Dtypes of the parameters, of the rank's own gradients, and those to which communication hooks round gradients;
    COMPRESSED where a hook loses more than that."""

    sharded: bool = False
    """Whether some parameters are sharded in a way that is not judged."""

    shards: list[str] = field(default_factory=list)
    """Names of the sharded parameters each element of which is on one rank. Their arrays UNCLIPPED and TAKEN are those
    of this rank's part; the sum over the ranks is the array of the whole gradient."""

    computed: list[str] = field(default_factory=list)
    """Dtypes in which autocast computed."""

    held: list[str] = field(default_factory=list)
    """Names of the parameters that are in the optimizer's groups."""

    lost: list[str] = field(default_factory=list)
    """Names of the parameters of which the rank computed a gradient that is not zero, where the optimizer took no
    gradient at all. Empty where it took any."""

    calls: int = 0
    """Number of calls of the optimizer's closure. 0: the step had no closure."""

    splits: bool = False
    """Whether the ranks compute parts of the same rows, as those of a tensor-parallel model do."""

    changed: Mapping[str, int] = field(default_factory=dict)
    """Name of a tensor that is not trained -> its digest, where it changed since the step before."""

    updates: Mapping[str, int] = field(default_factory=dict)
    """Name of a network that is not trained -> how often it changed since the step before."""

    early: list[str] = field(default_factory=list)
    """Names of the networks that are not trained and changed between the backward pass and the step."""

    foreign: int = 0
    """Number of tensors in the optimizer's groups that are no parameters of the models."""

    gathers: int = 0
    """Number of calls by which the script gathered tensors with a gradient from all ranks, outside of the backward
    pass."""

    cut_gathers: int = 0
    """Number of places in the losses' graphs that join tensors gathered from all ranks, of which only this rank's own
    part has a gradient."""

    own_statistics: bool = False
    """Whether the loss normalises what the model returns of this rank's rows by these rows' own deviation or variance.
    Known of the first step alone; False for every later one."""

    late_clips: int = 0
    """Number of clippings since the step before whose gradients were removed before any backward pass: these clipped
    gradients that a step had taken already."""

    unawaited: int = 0
    """Number of reductions (async_op=True) whose tensor was changed before the script waited for them, or for which it
    had not waited when the step began."""

    uncleared: list[str] = field(default_factory=list)
    """Names of the parameters whose gradient still holds the one that the optimizer's step before took."""

    settings: list[GroupSettings] = field(default_factory=list)
    """Settings of each of the optimizer's groups. Empty where they are those of the optimizer's step before."""

    begun: Mapping[str, int] = field(default_factory=dict)
    """Parameter or buffer -> its digest before the step, where the rank steps with its own gradients, and the script
    has written other weights since the step before. Empty of any other step."""

    modes: Mapping[str, bool] = field(default_factory=dict)
    """Layer that computes otherwise in evaluation mode (dropout, BatchNorm) -> whether it was in training mode at each
    backward pass of the step. Of the models that the optimizer moves."""


@dataclass(frozen=True)
class ClosureRecord:
    """How often one rank called its optimizer's closure."""

    calls: list[int]
    """Number of calls in each step."""

    done: int
    """Number of steps that have ended."""


@dataclass(frozen=True)
class PassRecord:
    """One pass over a DataLoader: an epoch, or what was seen of it."""

    loader: int
    """Number of the loader, from 0 in the order of the loaders' first passes."""

    length: int | None
    """Number of rows of the loader's dataset. None: the dataset has no length."""

    batch_size: int | None
    """`batch_size` of the loader. None: the loader has none, as with a batch sampler."""

    batches: list[list[int] | None]
    """Indices of each batch that was read. None for a batch of a dataset without indices."""

    rest: list[int] | None
    """Indices that this pass would have read after `batches`. None: not known."""

    digests: list[list[str]]
    """Digests of each row that was read, one for each of the row's tensors."""

    trained: int
    """Number of training forward passes that used batches of the pass."""

    sampler: str = ""
    """Class name of the loader's sampler."""

    dataset: str = ""
    """Digest of what the dataset holds for its first, middle and last row. '': not known."""

    workers: int = 0
    """Number of worker processes that read for the loader. 0: the rank's process reads."""


# Beside the steps


@dataclass(frozen=True)
class EvaluationRecord:
    """One pass over a DataLoader that is evaluated and not trained, or evaluated forward passes of other data."""

    number: int
    """Number of the pass, as an index of `ScriptRecord.passes`. NO_LOADER for forward passes of other data."""

    step: int
    """Number of optimizer steps that were taken before."""

    buffers: Mapping[str, int] = field(default_factory=dict)
    """Name of a buffer of the evaluated model that holds BatchNorm's statistics -> its digest."""

    collectives: list[str] = field(default_factory=list)
    """Operations that were called from the first forward pass up to the next training forward. ['none']: none was."""

    rows: list[str] = field(default_factory=list)
    """Digests of the rows of the model's inputs, for forward passes of other data."""

    with_loss: bool = False
    """Whether these forward passes of other data return a loss."""


UntrainedKind = Literal["frozen", "buffer"]


@dataclass(frozen=True)
class UntrainedRecord:
    """A tensor that no optimizer moves."""

    kind: UntrainedKind
    """Whether the tensor is a frozen parameter or a buffer."""

    network: str
    """Name of the module that the tensor is part of."""

    start: int
    """Digest of the tensor when it was first seen."""

    called: bool = True
    """Whether a forward pass of the network was seen. If not, the network is a copy of the model."""

    in_part: bool = False
    """Whether a step changed some of the tensor's elements and not others, as in a queue."""


@dataclass(frozen=True)
class FetchDraws:
    """The generators from which a process that reads for a loader draws in its second batch."""

    worker: int
    """Number of the loader's worker. 0 for the rank's own process, too."""

    states: list[str]
    """Digests, before that batch, of the generators from which the process draws for its rows."""


@dataclass(frozen=True)
class RandomRecord:
    """The states of the random generators of one rank."""

    states: Mapping[str, str] = field(default_factory=dict)
    """'torch', 'numpy' or 'python' -> the digest of the generator's state at the first training forward."""

    draws: list[str] = field(default_factory=list)
    """Digest of torch's state in the first training forward of each step, before the rank's own first draw in it. '':
    that forward draws nothing, or only what all rows or all ranks have in common; or none was seen in the step."""

    workers: list[int] = field(default_factory=list)
    """Seed from which a loader's workers take theirs, for each pass that has workers."""

    beside: list[str] = field(default_factory=list)
    """Digest, for each step, of a generator from which numbers for the rows are drawn between the loader and the model.
    '': no such numbers are drawn."""

    fetched: list[FetchDraws] = field(default_factory=list)
    """What the datasets draw, for each process that reads a dataset that is trained with."""


@dataclass(frozen=True)
class GroupRecord:
    """The collectives of one process group, in their order."""

    ranks: list[int]
    """Ranks of the group. Empty: not known."""

    calls: list[str]
    """Operation, shapes of the inputs and dtype of each collective, as 'all_reduce [16, 8] float'."""

    first: int = 1
    """Number of the first collective in `calls`, from 1. It is larger where torch has forgotten older ones."""


@dataclass(frozen=True)
class SaveRecord:
    """A file that torch.save wrote."""

    file: str
    """Path of the file, with symbolic links resolved."""

    step: int
    """Number of optimizer steps that were taken before the file was first written."""


@dataclass(frozen=True)
class LoopRecord:
    """A loop in the user's code around an optimizer's step."""

    file: str
    """Path of the file that holds the loop."""

    line: int
    """Line of the loop's head, from 1. 0: the file cannot be parsed."""

    rounds: int | None
    """Number of rounds of the loop. None: not known."""


@dataclass(frozen=True)
class ScheduleRecord:
    """A schedule of torch.optim.lr_scheduler."""

    number: int
    """Number of the schedule, from 0 in the order in which the schedules were made."""

    length: int | None
    """Number of times that the schedule is to be advanced. None: it has no end, or its length is not known."""

    kind: str = ""
    """Class name of the schedule."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Name -> value of the numbers with which the schedule was made."""


@dataclass(frozen=True)
class ScriptRecord:
    """What one rank recorded of a script."""

    rank: int
    """Rank of this process."""

    size: int
    """Number of ranks."""

    start: Mapping[str, int]
    """Parameter -> its digest at the first training forward. Frozen parameters are included, with '(frozen)' in the
    name; parameters that are sharded over all ranks are not."""

    steps: list[StepRecord]
    """Recorded optimizer steps, in their order."""

    passes: list[PassRecord]
    """Passes over DataLoaders, in the order in which they began."""

    ended: Literal["steps", "itself"]
    """'steps': the recording ended after the steps that were asked for. 'itself': the script ended before."""

    libraries: list[str]
    """Names of the libraries with which the script trains, as 'accelerate' or 'lightning'."""

    record_s: float
    """Seconds that recording took."""

    step_s: list[float]
    """Seconds of each step, with the time that recording took."""

    epochs_set: int = 0
    """Number of calls of DistributedSampler.set_epoch."""

    buffers: Mapping[str, int] = field(default_factory=dict)
    """Buffer -> its digest after the first step."""

    left: Message | None = None
    """By which line the script ended itself, and the exception that it had caught before. None: neither is known."""

    notes: list[Message] = field(default_factory=list)
    """What the recorder could not see."""

    evaluations: list[EvaluationRecord] = field(default_factory=list)
    """Passes and forward passes that are evaluated and not trained."""

    reports: list[ReportRecord] = field(default_factory=list)
    """Numbers that the script reports of its evaluations, in their order."""

    randoms: RandomRecord = field(default_factory=RandomRecord)
    """States of the random generators."""

    groups: Mapping[str, GroupRecord] = field(default_factory=dict)
    """Name of a process group -> its collectives."""

    saves: list[SaveRecord] = field(default_factory=list)
    """Files that torch.save wrote, each once."""

    calls: list[CallRecord] = field(default_factory=list)
    """Lines of the user's code that call torch."""

    untrained: Mapping[str, UntrainedRecord] = field(default_factory=dict)
    """Name -> record of each tensor that no optimizer moves."""

    alone: int = 0
    """Number of steps that the rank took before `steps`, while the other ranks took none."""

    rollouts: list[tuple[int, int]] = field(default_factory=list)
    """(step, number of forward passes without gradients in training mode before it), for steps that have any."""

    ties: list[tuple[str, str]] = field(default_factory=list)
    """(embedding, output layer) pairs of trained parameters that begin with the same values."""

    still: float | None = None
    """Share of elements of 16-bit weights that no step moved, among those with a gradient. None: there are none."""

    loops: list[LoopRecord] = field(default_factory=list)
    """Loops around the first step, the innermost first. Empty where the code of a library lies between them."""

    schedules: list[ScheduleRecord] = field(default_factory=list)
    """Schedules of learning rates that the script made."""

    follows: Mapping[str, float] = field(default_factory=dict)
    """Network that begins as a copy of trained weights -> how far it moved, as a share of how far those weights did."""

    # A model that is divided over ranks
    meshes: list[MeshRecord] = field(default_factory=list)
    """Device meshes of the model's tensors. Empty where the model is whole, or divided by FSDP over all ranks alone."""

    pieces: Mapping[str, PieceRecord] = field(default_factory=dict)
    """Name -> this rank's piece of a tensor that is divided over `meshes`: of each parameter under its own name, of the
    rank's own gradients (LOCAL) under LOCAL_PIECE, and of the arrays UNCLIPPED and TAKEN under TAKEN."""

    divides_inputs: bool = False
    """Whether the ranks of a replica are given pieces of the replica's inputs."""

    reduces_in_forward: bool = False
    """Whether the script called all_reduce in a training forward."""

    may_communicate: bool = True
    """Whether the rank could tell other ranks anything at a step: torch's process group was open, another library that
    communicates was loaded, or weights were in shared memory."""

    stages: list[StageRecord] = field(default_factory=list)
    """Stages that the rank holds of a pipeline of torch.distributed.pipelining. Empty: there is no such pipeline."""

    talks: list[TalkRecord] = field(default_factory=list)
    """Operations of each group whose ranks tell each other what a model computes."""

    # The trained parameters, and the first step
    shapes: Mapping[str, list[int]] = field(default_factory=dict)
    """Trained parameter -> its shape."""

    uniform: list[str] = field(default_factory=list)
    """Names of the trained parameters whose elements all begin with the same value, as zeros."""

    modules: list[ModuleRecord] = field(default_factory=list)
    """Calls of modules in the first training forward."""

    functions: list[str] = field(default_factory=list)
    """Names of the functions that the graphs of the first step's losses are made of."""
