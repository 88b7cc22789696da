"""check --fix: tries the patches of a script's findings on a copy of its folder, and checks that copy.

The user's own files are not written to. Each patch is tried on top of those before it, until nothing is left to mend.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from samestep.commands.user_sources import read_sources
from samestep.commands.working_copy import copy_folder
from samestep.errors import TrainingFailed, UserError
from samestep.judge.sites import files_of
from samestep.judge.suggested_patches import Patch, patch_of
from samestep.records.files import read, replace_text
from samestep.records.findings import CheckResults, Finding, FixRecord
from samestep.records.script import ScriptRecord
from samestep.records.script_plan import ScriptPlan

PATCHES = 3  # the most patches that are tried, each on top of the last
COPY, RECORDS = "patched{}", "patched{}-records"  # in the folder of the records
Check = Callable[[Path, Path], CheckResults]


def try_patches(
    results: CheckResults, ranks: Sequence[ScriptRecord], plan: ScriptPlan, check: Check
) -> list[FixRecord]:
    """Returns what the checks of patched copies say.

    check: checks a copy of the working directory, which is the present folder then, and keeps the records in another.
    """
    fixes: list[FixRecord] = []
    current_folder, folder, texts = Path.cwd(), Path(plan.out).absolute(), dict[Path, str]()
    base = current_folder
    for number in range(1, PATCHES + 1):
        finding, patch = _next(results, ranks, {fix.id for fix in fixes})
        if finding is None or patch is None or not Path(patch.file).is_relative_to(base):
            break
        file = Path(patch.file).relative_to(base)
        texts[file] = patch.text
        copy, out = folder / COPY.format(number), folder / RECORDS.format(number)
        copy_folder(current_folder, copy, plan.started_at, folder)
        for name, text in texts.items():
            _write(copy, name, text)
        try:
            with _inside(copy):
                results = check(copy, out)
        except (TrainingFailed, UserError):
            fixes.append(FixRecord(finding.message.id, patch.diff(base), str(copy / file), None))
            break
        left = [result.message.id for result in results.findings if result.answer in ("differs", "warning")]
        fixes.append(FixRecord(finding.message.id, patch.diff(base), str(copy / file), results.answer, left))
        if not left or finding.message.id in left:
            break
        ranks = [read(ScriptRecord, out / f"rank{rank}.json") for rank in range(len(ranks))]
        base = copy
    return fixes


def _next(
    results: CheckResults, ranks: Sequence[ScriptRecord], tried: set[str]
) -> tuple[Finding, Patch] | tuple[None, None]:
    """Returns the first finding that has a patch which was not tried, and this."""
    sources = read_sources(files_of(ranks))
    findings = sorted(results.findings, key=lambda finding: finding.answer != "differs")
    for finding in findings:
        is_wrong = finding.answer in ("differs", "warning") and finding.message.id not in tried
        if is_wrong and finding.patch and (patch := patch_of(finding, ranks, sources)):
            return finding, patch
    return None, None


def _write(copy: Path, name: Path, text: str) -> None:
    """Writes a file of a copy, which may be a link to the user's own, or lie in a folder that is one."""
    for parent in [*reversed(name.parents)][1:]:
        folder = copy / parent
        if folder.is_symlink():
            original = folder.resolve()
            folder.unlink()
            shutil.copytree(original, folder, symlinks=True)
    replace_text(copy / name, text)


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Makes a folder the working directory."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
