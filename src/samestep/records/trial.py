"""Trial: one candidate fault with which the reference has replayed a training that differs."""

from __future__ import annotations

from dataclasses import dataclass

from samestep.message import Message

EXPLAINS = 0.01  # the share of the difference that may stay unexplained
TELLS = 0.1  # the share of the difference that may be rounding: beyond it many a fault comes as near as the right one


@dataclass(frozen=True)
class Trial:
    """The result of one candidate fault: the share of a difference that it leaves unexplained.

    cause: the fault. where: the steps at which it acts. unexplained: the norm of what is left between the replay and
    the values that were found, as a share of that between the reference and these; None: it was not tried, for want of
    time, or could not be played. rounding: the share that rounding alone may leave. general: whether it fits one number
    to what was found, so that a fault without a free number is preferred.
    """

    cause: Message
    where: Message
    unexplained: float | None = None
    rounding: float = 0.0
    general: bool = False

    @property
    def explains(self) -> bool:
        """Whether the fault gives what was found, and rounding does not decide that."""
        return self.fits and self.rounding <= TELLS

    @property
    def fits(self) -> bool:
        """Whether the fault gives what was found, within rounding."""
        return self.unexplained is not None and self.unexplained <= EXPLAINS
