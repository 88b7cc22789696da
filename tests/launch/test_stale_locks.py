"""A lock that a killed build left is removed; one that is held stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from samestep.launch.supervise import ExtensionBuilds, clear_stale_locks

HOLD = """
import sys
from torch.utils.file_baton import FileBaton
baton = FileBaton(sys.argv[1])
assert baton.try_acquire()
print("held", flush=True)
sys.stdin.read()  # until it is killed, or whoever has started it ends
"""


@pytest.mark.check
def test_a_lock_that_a_killed_build_left(tmp_path: Path) -> None:
    lock = tmp_path / "py3_cpu" / "operator" / "lock"
    lock.parent.mkdir(parents=True)
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    builder = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], text=True, **pipes)
    try:
        assert builder.stdout and builder.stdout.readline() == "held\n"
        assert clear_stale_locks(env) == []
    finally:
        builder.kill()
        builder.wait()
    assert lock.exists()  # torch's own, left by its killed holder: whoever builds next would wait for ever
    assert clear_stale_locks(env) == [lock]
    assert clear_stale_locks(env) == []


@pytest.mark.parametrize("case", ["compiled", "loaded", "there before"])
def test_an_extension_that_is_compiled_is_named_once(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not one that is loaded, nor one that another command has begun to compile."""
    lock = tmp_path / "py3_cpu" / "operator" / "lock"
    lock.parent.mkdir(parents=True)
    (lock.parent / "build.ninja").touch()
    monkeypatch.setattr(ExtensionBuilds, "LOOK_EVERY_S", 0.0)
    if case == "there before":
        lock.touch()
    if case == "loaded":
        (lock.parent / "operator.so").touch()
    builds = ExtensionBuilds({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    lock.touch()
    builds.tell_new()
    builds.tell_new()
    assert capsys.readouterr().err.count("is being compiled") == (case == "compiled")
