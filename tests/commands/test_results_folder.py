"""What the folder of results is recognised by."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestep.commands import results_folder


def test_the_packages_digest_is_of_all_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "commands").mkdir()
    monkeypatch.setattr(results_folder, "__file__", str(tmp_path / "commands" / "results_folder.py"))
    found = {results_folder.package_digest()}
    for changed in ("commands/results_folder.py", "engine.py"):
        (tmp_path / changed).write_text("x = 1\n")
        found.add(results_folder.package_digest())
    (tmp_path / "engine.py").write_text("x = 2\n")
    assert len(found | {results_folder.package_digest()}) == 4
