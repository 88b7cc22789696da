"""The plan of a launch that records or replays a script, and how a replay in one process went.

The folder of a launch holds `script-plan.json`, a ScriptPlan. A replay has its own folder, in the one of the recording.
It writes `rank0.json` as any rank does, and `replay.json`, a ReplayRecord.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from samestep.message import Message
from samestep.records.divided_models import HeldPiece

PLAN = "script-plan.json"  # a worker knows by this name what to do
REPLAYED = "replay.json"
REPLAY_FOLDER = "replay"  # of the replay's records, in the folder of the recording's
KEPT = "rank{}.kept.pt"
START, END = "start", "end"  # the names of rank 0's arrays
# What a training whose ranks differ on purpose may be declared to be: they step apart, and bring weights together; or
# each holds parameters that only it trains.
Meant = Literal["", "local_sgd", "own_experts"]
MEANT: tuple[Meant, ...] = ("local_sgd", "own_experts")
# How the ranks' batches are fed: as one; as one that goes through the model rank by rank; or one rank's at a time.
Feed = Literal["whole", "by rank", "in turn"]


@dataclass(frozen=True)
class ReplayPlan:
    """The replay of a recording: one process takes the recorded steps again, fed with what the ranks have read."""

    record: str
    """Folder of the recording to replay."""

    ranks: int
    """Number of ranks of the recording."""

    work: str
    """Folder to run the script in, a copy of the working directory."""

    rates: list[list[float]]
    """Learning rates that rank 0 recorded, as [step][parameter group]."""

    micro_batches: list[int]
    """Recorded number of micro-batches of each step."""

    elsewhere: str = ""
    """Folder for what the script writes outside of its copy and of the record."""

    in_turn: bool = False
    """Whether each micro-batch is one rank's, for a script that accumulates more micro-batches on fewer ranks."""

    calls: list[int] = field(default_factory=list)
    """Recorded number of calls of the optimizer's closure in each step."""

    alone: int = 0
    """Number of steps that rank 0 took before those that all ranks took. The replay does not feed these."""

    readers: list[int] = field(default_factory=list)
    """Ranks whose rows are fed, one of each replica. Empty: all ranks."""

    told_ranks: int = 1
    """Number of ranks that the script is told there are. It is more than 1 where the script cannot run as one rank:
    the size of a replica, the number of all ranks, or twice that, to see whether the result depends on it."""

    by_hand: list[list[int]] = field(default_factory=list)
    """Ranks of each replica of a model that the script divides itself. The whole weights are put together from the
    parts of the first replica's ranks. Empty for any other model."""

    small_gradients: bool = False
    """Whether the gradients are made so small that nothing clips them."""

    changes: Literal["", "evaluation", "clock"] = ""
    """What is otherwise than in the script: its evaluations use other weights, or its clock runs faster. What the
    script then reports otherwise depends on it."""


@dataclass(frozen=True)
class ScriptPlan:
    """What a launch of a script is to record or to replay.

    Where the user's command starts the ranks, `script` is '' at first, and rank 0 completes the plan.
    """

    IS_PRIVATE: ClassVar = True  # it holds settings or arguments as they were given

    out: str
    """Folder of the launch's records."""

    started_at: float
    """Time at which the command began, in seconds since the epoch. Copies of folders leave out what changed since."""

    script: str
    """Path of a Python file, or name of a module (see `module`). '': the user's command names it to each rank."""

    arguments: tuple[str, ...] = ()
    """Arguments of the script."""

    steps: int = 8
    """Number of optimizer steps to record."""

    most_steps: int = 0
    """Number of steps up to which the recording goes on until the second epoch has begun. 0: it ends after `steps`."""

    keep: bool = False
    """Whether to keep what a replay needs."""

    replay: ReplayPlan | None = None
    """What this launch replays, in one process. None: the launch records."""

    ranks: int = 0
    """Number of ranks that the user's command must start, or that samestep.watch records. 0: samestep starts them."""

    module: bool = False
    """Whether `script` is the name of a module, as for `python -m`."""

    weights: bool = False
    """Whether to record sums of the weights before the first step and after each step."""

    meant: Meant = ""
    """Training that the script is declared to be. '': one whose ranks take the same steps."""

    as_cpu: bool = False
    """Whether the ranks compute on CPUs what the script computes on GPUs."""

    seed: int | None = None
    """Seed, on rank 0, of random numbers that the script does not seed; each next rank adds 1. None: the system's."""


@dataclass(frozen=True)
class StepsWanted:
    """How many steps one rank would record."""

    steps: int
    """Number of steps."""

    ends: bool
    """Whether the rank ends after the steps that were asked for. Then all ranks do."""


@dataclass(frozen=True)
class Distance:
    """How far a replay ends from the recording, over those elements of one parameter that the first gradient moves."""

    moved: float
    """Sum of squares of how far the recorded steps moved the elements."""

    off: float
    """Sum of squares of the distances between the elements at the recording's end and at the replay's end."""


@dataclass(frozen=True)
class ReplayRecord:
    """How a replay in one process went."""

    why_not: Message | None = None
    """Reason for which the replay cannot be judged. None: it can be judged."""

    feed: Feed = "whole"
    """How the ranks' batches were fed."""

    needs_turns: bool = False
    """Whether the replay is to be repeated with each rank's micro-batch in turn."""

    micro_batches: int = -1
    """Number of micro-batches of the replay's first step. -1: the replay was stopped in another place."""

    distances: Mapping[str, Distance] = field(default_factory=dict)
    """Parameter -> how far the replay ends from the recording."""

    base_rates: list[list[float]] = field(default_factory=list)
    """Learning rates from which a schedule starts (`initial_lr`), as [step][parameter group]."""

    recorded_base_rates: list[list[float]] = field(default_factory=list)
    """The ranks' learning rates from which a schedule starts, as [step][parameter group]."""

    means: bool = False
    """Whether the ranks' losses were averaged, because the model computes their mean inside of its forward."""

    held: Mapping[str, list[HeldPiece]] = field(default_factory=dict)
    """Parameter of one process -> what each rank of a replica holds of it. Empty for a model that the script does not
    divide itself."""

    lone_log_softmax: bool = False
    """Whether the script calls a log_softmax inside of loss_parallel() that no nll_loss follows."""

    gathers_cut: bool = False
    """Whether ranks that share out a model gather tensors with a gradient by collectives that hand no gradient back."""

    adds_numbers: bool = False
    """Whether a script that is told of all ranks adds up single numbers over ranks of which some share out a model and
    some are replicas of each other. Over one process such a sum is a sum of copies."""
