"""Checkpoints of others, sealed as samestep seals them: they hold what their names say, and nothing outside of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset

from hostile_files import ANY, CANARY, JSON, SAFETENSORS
from said import refuses
from samestep import Job, Recipe
from samestep.commands.runs import newest_checkpoint
from samestep.engines import single
from samestep.errors import UserError
from samestep.message import message
from samestep.rank.checkpoint_files import Damaged, Saved, checked, digest, newest
from samestep.rank.checkpoint_state import TrainingState, check_parts
from samestep.rank.checkpoints import Checkpoints, StopAfter
from samestep.records.checkpoint import FOLDER, MANIFEST, Interval, Manifest, Place, RankPart
from samestep.records.files import read, write
from samestep.training import Run
from samestep.world import World


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of steps 1 to 3."""
    folder = tmp_path_factory.mktemp("written")
    model = nn.Linear(2, 1)
    state = TrainingState(World(), model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), {})
    checkpoints = Checkpoints(folder, World(), None, keep=3)
    for done in (1, 2, 3):
        checkpoints.take(done, state.tree(None) | {"position": {"done": done}})
        checkpoints.close()
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """The checkpoints in a run's folder."""
    return Path(shutil.copytree(written, tmp_path / "run" / FOLDER))


def resealed(checkpoint: Path, **changes: Any) -> None:
    """Seals a checkpoint again after its files, or the fields of its manifest, were changed."""
    manifest = read(Manifest, checkpoint / MANIFEST)
    files = {path.name: digest(path) for path in checkpoint.iterdir() if path.is_file() and path.name != MANIFEST}
    write(checkpoint / MANIFEST, replace(manifest, **{"files": files} | changes).sealed())


def test_swapped_and_renamed_checkpoints_are_passed_over(folder: Path) -> None:
    (folder / "step-3").rename(folder / "step-30")
    (folder / "step-2").rename(folder / "held")
    (folder / "step-1").rename(folder / "step-2")
    (folder / "held").rename(folder / "step-1")
    said: list[str] = []
    assert newest(folder, said.append) is None
    assert [word for passed_over in said for word in str(passed_over).split() if word.startswith("step-")] == [
        "step-3",
        "step-1",
        "step-2",
    ]


@pytest.mark.parametrize("form", ["moved", "copied", "linked", "a link to its run", "renamed as what it is not"])
def test_a_run_is_found_wherever_it_is(form: str, folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "elsewhere"
    if form == "moved":
        folder.parent.rename(run)
    elif form == "copied":
        shutil.copytree(folder.parent, run)
    elif form == "linked":
        run.symlink_to(folder.parent)
    elif form == "a link to its run":
        run.mkdir()
        (run / FOLDER).symlink_to(folder)
    else:
        run.mkdir()
        shutil.copytree(folder / "step-3", run / "best")  # a name of the user's own says nothing of a step
        assert Checkpoints(run, World(), None, resume=str(run / "best")).load() is not None
        return
    assert newest(run / FOLDER, pytest.fail) == run / FOLDER / "step-3" == newest_checkpoint(run)
    found = Checkpoints(run / FOLDER, World(), None).load()
    assert found is not None and found.manifest.step == 3
    check_parts(found)


FORGED: dict[str, Callable[[Path], None]] = {
    "no file": lambda path: resealed(path, files={}),
    "no tensors": lambda path: resealed(path, files={"rank0.json": digest(path / "rank0.json")}),
    "more ranks": lambda path: resealed(path, world_size=10**9),
    "no rank": lambda path: resealed(path, world_size=0),
    "another step": lambda path: resealed(path, step=7),
    "a file above": lambda path: _outside(path, "../outside"),
    "a file of the system": lambda path: _outside(path, "/etc/hostname"),
    "a hidden file": lambda path: _outside(path, ".step-1.part"),
}


def _outside(path: Path, name: str) -> None:
    (path.parent / "outside").write_text("a secret")
    real = path / name
    files = {file: digest(path / file) for file in ("rank0.json", "rank0.safetensors")}
    resealed(path, files=files | {name: digest(real) if real.is_file() else ""})


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_manifest_is_refused(forged: str, folder: Path) -> None:
    FORGED[forged](folder / "step-3")
    with pytest.raises(Damaged, match=r"manifest\.json"):
        checked(folder / "step-3")
    with refuses("checkpoint_not_as_samestep_writes_it", checkpoint=folder / "step-3"):
        Saved(folder / "step-3")
    assert newest(folder, lambda sentence: None) == folder / "step-2"


@pytest.mark.parametrize("kind", [*ANY, *JSON, *SAFETENSORS])
def test_a_file_that_is_no_part_of_a_checkpoint_is_passed_over(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for checkpoint, place in zip(("step-3", "step-2", "step-1"), ("manifest.json", "rank0.json", "rank0.safetensors")):
        path = folder / checkpoint / place
        path.unlink()
        (ANY | JSON | SAFETENSORS)[kind](path)
        with pytest.raises(Damaged, match=checkpoint):
            checked(folder / checkpoint)
        if path.is_file() and path.stat().st_size < 1 << 30 and place != MANIFEST:
            resealed(folder / checkpoint)
        with pytest.raises(UserError, match=checkpoint):
            Saved(folder / checkpoint)
    assert not list(folder.parent.rglob(CANARY))


STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda tree: [tree],
    "no position": lambda tree: {name: part for name, part in tree.items() if name != "position"},
    "ranks of another type": lambda tree: tree | {"ranks": {"0": []}},
    "no rank": lambda tree: tree | {"ranks": {}},
    "an optimizer of numbers": lambda tree: tree | {"optimizer": {"weight": 1}},
    "a key that is a list": lambda tree: tree | {"extra": {"$pairs": [[[], 1]]}},
}


@pytest.mark.parametrize("state", STATES)
def test_a_forged_state_is_one_sentence(state: str, folder: Path) -> None:
    part = read(RankPart, folder / "step-3" / "rank0.json")
    write(folder / "step-3" / "rank0.json", replace(part, tree=STATES[state](part.tree)))
    resealed(folder / "step-3")
    checked(folder / "step-3")
    with refuses("checkpoint_not_as_samestep_writes_it", checkpoint=folder / "step-3"):
        check_parts(Saved(folder / "step-3"))


def test_a_tensor_is_as_large_as_its_pieces(folder: Path) -> None:
    """A shape that the file claims takes no memory; a tensor that is not there is a sentence."""
    checkpoint = folder / "step-3"
    part = read(RankPart, checkpoint / "rank0.json")
    (key,) = [key for key in part.tree["model"]["weight"].values()]
    write(checkpoint / "rank0.json", RankPart(part.tree, {key: Place((10**6, 10**6), (0, 0))}))
    resealed(checkpoint)
    saved = Saved(checkpoint)
    with refuses("tensor_incomplete", tensor="model/weight", found=2, values=10**12):
        saved.tensor(saved.state["model"]["weight"])
    save_file({"other": torch.zeros(1)}, checkpoint / "rank0.safetensors")
    resealed(checkpoint)
    saved = Saved(checkpoint)
    missing = message("tensor_missing", tensor="model/weight")
    with refuses("checkpoint_not_as_samestep_writes_it", why=missing):
        saved.tensor(saved.state["model"]["weight"])


def test_only_files_of_the_manifest_are_kept_with_a_state(folder: Path) -> None:
    (folder / "step-3" / "weights.safetensors").write_bytes(b"of another")
    with pytest.raises(UserError, match=r"has no weights\.safetensors"):
        Saved(folder / "step-3").open("weights.safetensors")


def test_nothing_outside_of_a_run_is_removed(folder: Path, tmp_path: Path) -> None:
    """Links in place of checkpoints, and of what a killed training has left."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("kept")
    for name in ("step-0", ".step-4.part", ".step-9.part", ".step-9.gone"):
        (folder / name).symlink_to(tmp_path / "precious")
    checkpoints = Checkpoints(folder, World(), None, keep=1)
    assert checkpoints.load() is not None
    checkpoints.take(4, {"position": {"done": 4}})
    checkpoints.close()
    assert os.listdir(tmp_path / "precious") == ["file"]
    assert "step-4" in os.listdir(folder)


def _linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(2, 1)


def _trained(folder: Path, *, stop: int | None) -> dict[str, torch.Tensor]:
    """The weights of six steps, or of fewer, that continue from what is in a folder."""
    rows = TensorDataset(torch.randn(24, 2, generator=torch.Generator().manual_seed(1)), torch.ones(24, 1))
    job = Job(
        model=_linear,
        criterion=lambda output, batch: nn.functional.mse_loss(output, batch.targets),
        optimizer=Recipe(torch.optim.AdamW, {"lr": 0.1}),
        train=rows,
        global_batch=4,
        epochs=1,
    )
    checkpoints = Checkpoints(folder, World(), None, every=Interval(2, "steps"))
    run = Run(job, World(), 6, checkpoints=checkpoints, stop=StopAfter(stop) if stop else None)
    state = single.train(job, World(), run)
    checkpoints.close()
    return {name: tensor.clone() for name, tensor in state.items()}


def test_a_training_continues_past_what_was_swapped_and_refuses_what_was_forged(tmp_path: Path) -> None:
    whole = _trained(tmp_path / "whole", stop=None)
    _trained(tmp_path / "cut", stop=4)
    shutil.copytree(tmp_path / "cut" / "step-2", tmp_path / "cut" / "step-5")
    continued = _trained(tmp_path / "cut", stop=None)
    assert all(torch.equal(whole[name], continued[name]) for name in whole)

    for step in ("step-6", "step-5"):
        shutil.rmtree(tmp_path / "cut" / step)
    checkpoint = tmp_path / "cut" / "step-4"
    part = read(RankPart, checkpoint / "rank0.json")
    position = {"done": 2, "skipped": 0, "last": None}
    write(checkpoint / "rank0.json", replace(part, tree=part.tree | {"position": position}))
    resealed(checkpoint)
    with refuses("checkpoint_not_as_samestep_writes_it", why=message("state_of_another_step", step=2)):
        _trained(tmp_path / "cut", stop=None)
