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
class ChainStep:
    """One step that the chain has played. recorded, played: of each replica and micro-batch, the loss.

    norms: parameter -> the norm of its gradient, the mean over replicas and micro-batches, of tied ones the sum of the
    copies'. norm: of all together, each tied weight once.
    """

    recorded: list[float]
    played: list[float]
    norms: Mapping[str, float]
    norm: float


@dataclass(frozen=True)
class ChainRecord:
    """What one process computes of the stages. why_not: the reason for which it cannot be judged; None where it can.

    replicas: the ranks of each pipeline. stages: the parameters of each. micro_batches: of one replica's step.
    reduction: of the loss over a batch. ties: names of the copies of one weight, in several stages. whole_loss: of the
    first batch, not cut into micro-batches; None where random numbers, or BatchNorm, make another one of it. weight:
    of the one term that the loss function returns; None where it has several, or another kind.
    """

    why_not: Message | None = None
    replicas: list[list[int]] = field(default_factory=list)
    stages: list[list[str]] = field(default_factory=list)
    micro_batches: int = 1
    reduction: Literal["mean", "sum"] = "mean"
    ties: list[list[str]] = field(default_factory=list)
    whole_loss: float | None = None
    weight: float | None = None
    steps: list[ChainStep] = field(default_factory=list)
