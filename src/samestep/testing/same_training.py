"""What the fixture `same_training` does: runs `samestep check` on a script, and fails the test where it says so."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from samestep.records.launch_files import OF_A_CHECK
from samestep.world.imports import module_arguments
from samestep.world.regular_files import remove_folder

RECORDED = "script-plan.json"  # in each folder of a record
UNKNOWN = 3  # the exit code where nothing differs, but not all could be judged


@dataclass(frozen=True)
class SameTraining:
    """Says of a script that its training is as it was. root: the working directory. temporary: a folder for records.
    update: whether to write the records that are compared with, in place of comparing."""

    root: Path
    temporary: Path
    update: bool

    def __call__(
        self,
        command: str,
        *,
        against: str | None = None,
        record: str | Path | None = None,
        nproc: int = 2,
        steps: int = 8,
        allow_unknown: bool = False,
        options: Sequence[str] = (),
    ) -> None:
        """Fails the test where the training is another one, and shows the first difference.

        command: a script with its arguments, as 'train.py --lr 0.1'; '-m' and a module; or a command that starts the
        ranks. against: a git revision, as of check --against. record: a folder with the steps as they were, which
        pytest --samestep-update writes; give one of the two. allow_unknown: pass where nothing differs, but not all
        could be judged. options: further ones of samestep check.
        """
        if (against is None) == (record is None):
            pytest.fail("same_training takes one of against=REVISION and record=FOLDER", pytrace=False)
        common = ["--nproc", str(nproc), "--steps", str(steps), *options]
        words = shlex.split(command)
        if words and words[0] != "-m" and not words[0].endswith(".py"):
            words = ["--", *words]
        if against is not None:
            compare = ["check", "--against", against, *common, "--out", str(self.temporary / "compared"), *words]
            self._judge(*self._run(compare), allow_unknown)
            return
        stored = self.root / str(record)
        new = stored if self.update else self.temporary / "recorded"
        if self.update and (stored / RECORDED).is_file():
            remove_folder(stored, OF_A_CHECK)
        elif not self.update and not (stored / RECORDED).is_file():
            pytest.fail(f"{stored} holds no record; pytest --samestep-update writes it", pytrace=False)
        _, said = self._run(["check", "--no-replay", *common, "--out", str(new), *words])
        if not (new / "results.json").is_file():
            pytest.fail(said, pytrace=False)
        if not self.update:
            self._judge(*self._run(["diff", str(stored), str(new)]), allow_unknown)

    def _run(self, words: Sequence[str]) -> tuple[int, str]:
        """Runs a command of samestep; returns its exit code, and what it has printed."""
        command = [sys.executable, *module_arguments("samestep"), *words]
        process = subprocess.Popen(
            command,
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            said, _ = process.communicate()
        except BaseException:  # Ctrl-C, or a time limit of the test's
            process.terminate()  # it ends the ranks
            process.wait()
            raise
        return process.returncode, said

    def _judge(self, code: int, said: str, allow_unknown: bool) -> None:
        if code not in ((0, UNKNOWN) if allow_unknown else (0,)):
            pytest.fail(said, pytrace=False)
