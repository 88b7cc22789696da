"""The errors that a user may see: each is one sentence that names what was wrong and what to do."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in what the user gave us. The command prints the sentence and exits with 2."""


class Refused(UserError):
    """The job asks for something that a layer or an engine cannot do; the sentence says which and what helps."""


class TrainingFailed(Exception):
    """A worker died or raised. The command prints the sentence and exits with 1."""


def not_a_scalar(shape: list[int]) -> UserError:
    """The mistake of a criterion that returns more than one number."""
    return UserError(
        f"the criterion returned a tensor of shape {shape}, not a scalar; "
        "return the mean over the rows, for example with reduction='mean'"
    )


def nearest(word: str, known: list[str]) -> str:
    """The tail of a sentence about an unknown name: the closest known one, or all of them."""
    from difflib import get_close_matches

    close = get_close_matches(word, known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"known are: {', '.join(known)}"
