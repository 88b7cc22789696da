"""The wheel holds all that samestep needs: installed by itself, away from its source."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from budget import budget
from samestep.launch.fork_client import SOCKETS

ROOT = Path(__file__).parents[1]


@pytest.mark.check
def test_a_wheel_works_away_from_its_source(tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    of_tests = (SOCKETS, "PYTEST_ADDOPTS")  # whose options are of this project's tests
    alone = {name: value for name, value in os.environ.items() if name not in of_tests} | {"PYTHONPATH": str(target)}

    def typed(*command: str | Path) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=elsewhere, env=alone, capture_output=True, text=True, timeout=budget(200)
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    typed(*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("samestep-*.whl")
    typed(*pip, "install", "--no-deps", "--target", target, wheel)
    assert Path(typed("-c", "import samestep; print(samestep.__file__)").strip()).is_relative_to(target)
    assert "@pytest.mark.samestep_ranks" in typed("-m", "pytest", "--markers")
    assert "same step" in typed("-m", "samestep", "verify", "digits", "--engine", "ddp", "--nproc", "2")
    assert "<html" in next(elsewhere.glob("runs/*/report.html")).read_text()
    assert "DistributedDataParallel(" in typed("-m", "samestep", "eject", "digits", "--engine", "ddp")
    assert "kind: Service" in typed("-m", "samestep", "run", "digits", "--to", "k8s", "--image", "x")
    assert "kind: PyTorchJob" in typed("-m", "samestep", "run", "digits", "--to", "kubeflow", "--image", "x")
    assert "#SBATCH" in typed(target / "bin" / "samestep", "slurm", "digits", "--dry-run")
