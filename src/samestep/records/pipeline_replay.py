"""The record of a chain: the stages of a pipeline, put together in one process, and played with the ranks' inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from samestep.message import Message

CHAIN_FOLDER = "chain"  # of the chain's arrays, in the folder of the recording
CHAIN = "chain.json"
STAGES = "rank{}.stages.pkl"  # what a rank keeps of its stages


@dataclass(frozen=True)
class PipelineReplayStep:
    """One step that the chain has played."""

    recorded: list[float]
    """Loss that the ranks computed, for each replica and micro-batch."""

    played: list[float]
    """Loss that the chain computed, for each replica and micro-batch."""

    norms: Mapping[str, float]
    """Parameter -> norm of its gradient, which is the mean over the replicas and, where the loss is a mean, over the
    micro-batches. For tied parameters it is the norm of the sum of the copies' gradients."""

    norm: float
    """Norm of all gradients together, with each tied weight once."""


@dataclass(frozen=True)
class PipelineReplayRecord:
    """What one process computes of the stages of a pipeline."""

    why_not: Message | None = None
    """Reason for which the pipeline cannot be judged. None: it can be judged."""

    replicas: list[list[int]] = field(default_factory=list)
    """Ranks of each pipeline."""

    stages: list[list[str]] = field(default_factory=list)
    """Names of each stage's parameters."""

    micro_batches: int = 1
    """Number of micro-batches of one replica's step."""

    reduction: Literal["mean", "sum"] = "mean"
    """How the loss of a batch follows from the losses of its micro-batches."""

    ties: list[list[str]] = field(default_factory=list)
    """Names of the copies of one weight in several stages, for each such weight."""

    whole_loss: float | None = None
    """Loss of the first batch, not cut into micro-batches. None: random numbers or BatchNorm make it another one."""

    weight: float | None = None
    """Weight of the one term that the loss function returns. None: it returns several terms, or one of another kind."""

    steps: list[PipelineReplayStep] = field(default_factory=list)
    """Steps that the chain has played."""
