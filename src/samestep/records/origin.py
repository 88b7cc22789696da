"""Origin: where a difference arises: along which axes of the mesh, by proofs on parts of it, and in which module."""

from __future__ import annotations

from dataclasses import dataclass

from samestep.message import Message


@dataclass(frozen=True)
class AxisTrial:
    """The proof of a training that is wrong, again, on some axes of its mesh.

    axes: those that have their ranks; the others have one. mesh: the same as 'tensor=2'; '': one rank. differs: whether
    the training is wrong there, too; None: that is not known. why: it is not.
    """

    axes: tuple[str, ...]
    mesh: str
    differs: bool | None
    why: Message | None = None


@dataclass(frozen=True)
class Origin:
    """Where a difference arises.

    axes: without which it is gone; empty where it is there on one rank, and where that is not known. module: the one
    with which it begins; '': it begins with none, or that is not known. said: what of this is to be told.
    """

    axes: tuple[str, ...] = ()
    module: str = ""
    said: tuple[Message, ...] = ()
    trials: tuple[AxisTrial, ...] = ()
