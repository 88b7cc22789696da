"""An ejected script trains as samestep does, to the last bit, where samestep cannot be imported."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import run_own, run_script, skip_unless_here, write

from samestep import engine as engines

DIGITS = {"epochs": "1", "width": "8"}


@pytest.mark.parametrize("engine", engines.names())
def test_digits_is_the_same_training(engine: str, tmp_path: Path) -> None:
    skip_unless_here(engine)
    script = write("digits", engine, tmp_path / "script", 2, DIGITS)
    own = "single" if engine == "dataparallel" else engine
    run_script(script, engine, 2).check_equal(run_own("digits", own, tmp_path / "own", 2, DIGITS))
