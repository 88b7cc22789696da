"""Whatever code of another package raises becomes an Exception; a signal of the user's does not."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

import pytest

from samestep.errors import UserError
from samestep.world.foreign_code import ENDING, ForeignError, as_exceptions, error_line


class Own(BaseException):
    pass


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), SystemExit("no licence"), GeneratorExit(), Own("own\nmore")])
def test_what_is_no_exception_becomes_one_that_names_it(raised: BaseException) -> None:
    with pytest.raises(ForeignError) as error, as_exceptions():
        raise raised
    said = str(raised).partition("\n")[0]
    assert error_line(error.value) == type(raised).__name__ + (f": {said}" if said else "")
    assert error.traceback[-1].path.name == "test_foreign_code.py"  # the line that raised


def test_an_exception_stays_what_it_is() -> None:
    with pytest.raises(UserError, match="why"), as_exceptions():
        raise UserError("why")
    assert error_line(ValueError("a\nb")) == "ValueError: a" and error_line(ValueError()) == "ValueError"


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_ends_the_command_as_ever(number: int, kind: type[BaseException]) -> None:
    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    handlers = [signal.getsignal(getattr(signal, name)) for name in ENDING]
    try:
        with pytest.raises(kind), as_exceptions():
            signal.raise_signal(number)
        assert [signal.getsignal(getattr(signal, name)) for name in ENDING] == handlers
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_the_code_sets_stays() -> None:
    before = signal.getsignal(signal.SIGTERM)
    own: Callable[[int, object], None] = lambda number, frame: None  # noqa: E731
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with as_exceptions():
            signal.signal(signal.SIGTERM, own)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
