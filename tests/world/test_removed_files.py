"""What is kept, refused and removed in a folder where others may have put something."""

from __future__ import annotations

import os
import re
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from budget import wait_until
from said import refuses
from samestep.launch.end import local_pids
from samestep.records.launch_files import (
    OF_A_CHECK,
    OF_A_LAUNCH,
    OF_CHECKPOINTS,
    OF_MONITORED,
    OF_RANKS,
    OF_SPOT_CHECKS,
)
from samestep.records.record import rank_files
from samestep.world.regular_files import (
    fresh_folder,
    make_folder,
    move_file,
    open_end,
    open_kept,
    open_new,
    paths_in,
    remove_file,
    remove_folder,
)


def test_other_names_stay(tmp_path: Path) -> None:
    step, precious = tmp_path / "spot-check" / "step-3", tmp_path / "precious"
    step.mkdir(parents=True)
    precious.mkdir()
    for path in (step / "rank0.json", step / ".rank0.json.12", precious / "rank0.json", step / "notes.txt"):
        path.write_text("kept")
    (tmp_path / "spot-check" / "step-4").symlink_to(precious)
    remove_folder(tmp_path / "spot-check", OF_SPOT_CHECKS)
    assert sorted(os.listdir(tmp_path / "spot-check")) == ["step-3", "step-4"]
    assert os.listdir(step) == ["notes.txt"] and os.listdir(precious) == ["rank0.json"]
    with refuses("place_is_taken"):
        fresh_folder(tmp_path, tmp_path / "spot-check", OF_SPOT_CHECKS)
    (step / "notes.txt").unlink()
    (tmp_path / "spot-check" / "step-4").unlink()
    assert os.listdir(fresh_folder(tmp_path, tmp_path / "spot-check" / "deeper", OF_SPOT_CHECKS)) == []
    remove_folder(tmp_path / "spot-check", OF_SPOT_CHECKS)
    assert os.listdir(tmp_path) == ["precious"]


@pytest.mark.parametrize(
    "use",
    [
        make_folder,
        lambda path: fresh_folder(path.parent, path, OF_RANKS),
        lambda path: fresh_folder(path.parent, path / "deeper", OF_RANKS),
        lambda path: remove_folder(path, OF_RANKS),
    ],
)
def test_a_link_in_the_place_of_a_folder_is_refused(use: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "rank0.json").write_text("kept")
    (tmp_path / "own").symlink_to(tmp_path / "precious")
    with refuses("place_is_taken"):
        use(tmp_path / "own")
    assert os.listdir(tmp_path / "precious") == ["rank0.json"]


def _link(path: Path) -> None:
    path.symlink_to("precious")


def _second_name(path: Path) -> None:
    os.link(path.with_name("precious"), path)


@pytest.mark.parametrize("plant", [_link, _second_name, os.mkfifo, os.mkdir])
def test_what_is_kept_is_a_file_with_one_name(plant: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    plant(tmp_path / "own")
    for use in (open_end, open_kept):
        with refuses("place_is_taken"):
            use(tmp_path / "own")
    if plant is os.mkdir:
        for clear in (open_new, remove_file, lambda path: move_file(tmp_path / "precious", path)):
            with refuses("place_is_taken"):
                clear(tmp_path / "own")
    else:
        open_new(tmp_path / "own").close()
    assert (tmp_path / "precious").read_text() == "kept"
    with open_end(tmp_path / "new") as file:
        file.write(b"a")
    with open_end(tmp_path / "new", text=True) as file:
        file.write("b")
    with open_kept(tmp_path / "new") as file:
        assert file.read() == b"ab"


@pytest.mark.parametrize(
    ("names", "own", "others"),
    [
        (OF_RANKS, "rank0.json .rank0.json.71 rank1.log.1 pid-rank0 log.txt log-host.txt", "my-rank0.txt logbook.txt"),
        (OF_A_LAUNCH, "rank0.0.sgd.npz plan.json life/.step.safetensors life/checkpoints/step-1/rank0.json", "notes"),
        (OF_CHECKPOINTS, "sgd/step-1/manifest.json sgd/.step-2.part/rank0.safetensors", "sgd/step-1/notes.txt"),
        (OF_A_CHECK, ".lock study.json rank0.kept.pt rank0.step0.npz chain/rank0.end.npz", "train.py python/a.py"),
        (
            OF_MONITORED,
            "heartbeat-rank0 monitored-12 python/sitecustomize.py questions/rank0 questions/rank0-c",
            "python/a.py",
        ),
    ],
)
def test_names_are_those_that_are_given(names: re.Pattern[str], own: str, others: str) -> None:
    assert [name for name in own.split() if not names.fullmatch(name)] == []
    assert [name for name in others.split() if names.fullmatch(name)] == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a device")
def test_a_device_stays(tmp_path: Path) -> None:
    """Root could remove /dev/full, which somebody has named or has made a link to."""
    device, file = tmp_path / "device", tmp_path / "file"
    os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    file.touch()
    for clear in (open_new, remove_file, lambda path: move_file(file, path)):
        with refuses("place_is_taken"):
            clear(device)
    assert stat.S_ISCHR(device.lstat().st_mode)


def test_a_folder_that_goes_while_it_is_listed_holds_nothing(tmp_path: Path) -> None:
    """Another process removes it between two calls of the operating system: Path.glob raises then."""
    folder, go_on = tmp_path / "out", threading.Event()

    def come_and_go() -> None:
        while not go_on.is_set():
            folder.mkdir()
            (folder / "rank0.log").touch()
            shutil.rmtree(folder)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        wait_until(lambda: _raises(lambda: [*folder.glob("rank*.log")]), "a plain glob has not met the folder's end")
        for _ in range(500):
            assert paths_in(folder, "rank*.log") in ([], [folder / "rank0.log"])
            rank_files(folder)
            local_pids(folder)
    finally:
        go_on.set()
        thread.join()


def _raises(act: Callable[[], object]) -> bool:
    try:
        act()
    except OSError:
        return True
    return False
