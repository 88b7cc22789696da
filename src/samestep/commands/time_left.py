"""Estimates the time left of a training."""

from __future__ import annotations

from datetime import timedelta


class TimeLeft:
    """Estimates the rest of a training from the time of its steps so far, evaluations included."""

    def __init__(self) -> None:
        self.first: tuple[int, float] | None = None  # steps done, and when

    def after(self, done: int, steps: int, now: float) -> str:
        """Returns the time left as '0:01:30'; '' before it can be estimated. now: in seconds, of any clock."""
        if self.first is None or done < self.first[0]:  # the ranks were restarted
            self.first = (done, now)
        first, began = self.first
        if done == first:
            return ""
        return str(timedelta(seconds=round((now - began) / (done - first) * (steps - done))))
