"""The batch script: as it is written, and as bash reads it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from samestep.errors import UserError
from samestep.launch.submit import Training
from samestep.launch.submit.slurm import script, submit

GOLDEN = Path(__file__).parent / "golden"
CASES = {
    "slurm-gpus": (Training("digits", 2, 4, 4, "fsdp", ["epochs=2"], ["wrap=root"]), "2:00:00", ["--partition=gpu"]),
    "slurm-cpus": (Training("my jobs/x y.py:job", 1, 2, 0, threads=3), "30:00", []),
}


@pytest.mark.parametrize("case", CASES)
def test_script(case: str) -> None:
    training, time, options = CASES[case]
    text = script(training, Path("/out/a b"), time, options).replace(sys.executable, "PYTHON")
    assert text == (GOLDEN / f"{case}.sh").read_text()
    read = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert read.returncode == 0, read.stderr


def test_without_slurm_a_sentence_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"sbatch is not installed here; type `sbatch x\.sh` where Slurm is"):
        submit(Path("x.sh"))
