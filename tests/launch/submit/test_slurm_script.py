"""The batch script: as it is written, and as bash reads it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from budget import budget
from command import JOBS
from launch.submit.hostile import HOSTILE, HOSTILE_JOB
from samestep.errors import UserError
from samestep.launch.submit import Training, sbatch, slurm_script

GOLDEN = Path(__file__).parent / "golden"
CASES = {
    "slurm-gpus": (Training("digits", 2, 4, 4, "fsdp", ["epochs=2"], ["wrap=root"]), "2:00:00", ["--partition=gpu"]),
    "slurm-cpus": (Training("my jobs/x y.py:job", 1, 2, 0, "ddp", threads=3), "30:00", []),
}


@pytest.mark.parametrize("case", CASES)
def test_script(case: str) -> None:
    training, time, options = CASES[case]
    text = slurm_script(training, Path("/out/a b"), time, options).replace(sys.executable, "PYTHON")
    assert text == (GOLDEN / f"{case}.sh").read_text()
    read = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert read.returncode == 0, read.stderr


@pytest.mark.parametrize(
    ("setting", "out", "option"),
    [
        ("note=a\nrm -r x", "/out", ""),
        ("", "/out\n#SBATCH --wrap=x", ""),
        ("", "/out", "--partition=a\rb"),
        ("", "/o\u2028ut", ""),
    ],
)
def test_no_value_adds_a_line(setting: str, out: str, option: str) -> None:
    with pytest.raises(UserError, match="a line break"):
        slurm_script(Training("digits", 1, 1, 0, "ddp", settings=[setting]), Path(out), "30:00", [option])


def test_a_percent_sign_in_the_folder_is_not_sbatchs() -> None:
    text = slurm_script(Training("digits", 1, 1, 0, "ddp"), Path("/50%j"), "30:00")
    assert '#SBATCH --output="/50%%j/slurm-%j.out"' in text and "--out /50%j" in text


def test_on_one_machine_the_line_is_one_that_run_takes(tmp_path: Path) -> None:
    """As bash reads the script; srun, which is not here, is a script that only starts what it is given."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@" --dry-run\n')
    srun.chmod(0o755)
    text = slurm_script(Training(f"{JOBS}:quick", 1, 1, 0, "ddp", threads=1), tmp_path / "a 'b", "30:00")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash"], input=text, capture_output=True, text=True, timeout=budget(), env=environment)
    assert done.returncode == 0, done.stderr
    assert "samestep.worker" in done.stdout


def test_without_slurm_a_sentence_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"`sbatch x\.sh`"):
        sbatch(Path("x.sh"))


def test_no_value_means_something_to_the_shell_or_sbatch(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    (tmp_path / "srun").chmod(0o755)
    settings = [f"v{number}={value}" for number, value in enumerate(HOSTILE)]
    folder = Path('/out/it\'s "$(touch ran)" `touch ran` \\ 50%j é')
    text = slurm_script(Training(HOSTILE_JOB, 1, 1, 0, "ddp", settings), folder, "30:00", ["--partition=gpu"])
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    line = ["bash", "-c", text]
    done = subprocess.run(line, capture_output=True, text=True, timeout=budget(20), env=environment, cwd=tmp_path)
    assert done.returncode == 0 and [*tmp_path.iterdir()] == [tmp_path / "srun"], done.stderr
    words = json.loads(done.stdout)
    words = words[words.index("run") :]
    given = [word for pair in settings for word in ("--set", pair)]
    assert words[: 4 + len(given)] == ["run", f"./{HOSTILE_JOB}", "--engine", "ddp", *given]
    assert words[words.index("--out") + 1] == str(folder)
    directives = [
        shlex.split(each.removeprefix("#SBATCH ")) for each in text.splitlines() if each.startswith("#SBATCH")
    ]
    (output,) = [words[0] for words in directives if words[0].startswith("--output")]
    assert output.replace("%%", "%") == f"--output={folder}/slurm-%j.out" and [*map(len, directives)] == [1] * len(
        directives
    )
