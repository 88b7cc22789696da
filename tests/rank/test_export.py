"""run --export: a folder that from_pretrained loads, with the trained weights, or a sentence before the training."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from pretrained import Classifier, Encoder, job
from safetensors.torch import load_file
from torch import nn
from torch.distributed import HashStore

from command import TESTS, samestep
from samestep.commands.training_options import _check_export
from samestep.errors import UserError
from samestep.rank.weights import export, on_first, pretrained, save
from samestep.world import World

JOB = f"{TESTS}/rank/pretrained.py"


def run(out: Path, *settings: str, says: str = "") -> Path:
    """Trains two steps on two ranks and exports. Returns the folder."""
    done = samestep("run", JOB, "--nproc", "2", "--engine", "ddp", *settings, "--export", f"{out}/hub", out=out / "run")
    assert done.returncode == 0 and says in done.stderr, done.stderr
    assert not list(out.glob(".*"))
    return out / "hub"


def equal(exported: nn.Module, out: Path, prefix: str) -> None:
    """Whether an exported module has the averaged weights, bit by bit, and not the first ones."""
    trained = load_file(out / "run" / "weights.safetensors")
    state = exported.state_dict()
    assert {name for name in trained if name.startswith(prefix)} == {f"{prefix}{name}" for name in state}
    assert all(torch.equal(trained[f"{prefix}{name}"], tensor) for name, tensor in state.items())
    assert any(not torch.equal(tensor, trained[name]) for name, tensor in job(not prefix).model().state_dict().items())


def test_the_part_that_can_is_exported(tmp_path: Path) -> None:
    equal(Encoder.from_pretrained(run(tmp_path)), tmp_path, "encoder.")
    before = (tmp_path / "hub" / "config.json").stat().st_mtime_ns
    run(tmp_path, says="already finished")
    assert (tmp_path / "hub" / "config.json").stat().st_mtime_ns == before


@pytest.mark.check
def test_transformers_loads_what_was_trained(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    folder = run(tmp_path, "--set", "transformers=true")
    equal(AutoModelForSequenceClassification.from_pretrained(folder), tmp_path, "")


def test_the_outermost_modules_are_found() -> None:
    assert list(pretrained(nn.Sequential(Classifier(), Encoder(2)))) == ["0.encoder", "1"]
    whole = Encoder(2)
    whole.inner = Encoder(2)
    assert list(pretrained(whole)) == [""] and not pretrained(nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("modules", "folder", "says"),
    [
        ((), "new", "neither the job's model nor a module of it has save_pretrained"),
        (("student", "teacher"), "new", r"2 modules of the model have save_pretrained \(student, teacher\)"),
        (("",), "something", "is a file, and would be replaced"),
        (("",), "something/new", "something is a file; give a folder in another one"),
        (("",), "", "something in it is of no export"),
    ],
)
def test_what_cannot_be_is_refused(modules: tuple[str, ...], folder: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    with pytest.raises(UserError, match=says):
        _check_export(tmp_path / folder, modules)


def test_folders_above_it_are_made(tmp_path: Path) -> None:
    weights, hub = tmp_path / "weights.safetensors", tmp_path / "none" / "new" / "hub"
    save(Encoder(2).state_dict(), weights)
    _check_export(hub, ("",))
    assert not (tmp_path / "none").exists()
    export(lambda: Encoder(2), weights, hub)
    assert any(hub.iterdir())


def test_it_is_refused_before_the_training(tmp_path: Path) -> None:
    done = samestep("run", "digits", "--export", f"{tmp_path}/hub", out=tmp_path / "run")
    assert done.returncode == 2 and "has save_pretrained" in done.stderr
    assert not list(tmp_path.rglob("*.safetensors"))


def test_what_a_user_has_put_beside_an_export_is_not_removed(tmp_path: Path) -> None:
    """An export may be replaced by the same training's, continued; not what is in it besides, as a tokenizer."""
    weights, hub = tmp_path / "weights.safetensors", tmp_path / "hub"
    save(Encoder(2).state_dict(), weights)
    export(lambda: Encoder(2), weights, hub)
    _check_export(hub, ("",))
    (hub / "tokenizer").mkdir()
    (hub / "tokenizer" / "vocab.txt").write_text("a")
    with pytest.raises(UserError, match=r"tokenizer/vocab\.txt"):
        _check_export(hub, ("",))


def test_a_failure_names_the_weights(tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    save(Classifier().state_dict(), weights)
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "in the way").touch()
    with pytest.raises(UserError, match=r"Encoder.save_pretrained .*OSError: .*weights.safetensors"):
        export(Classifier, weights, tmp_path / "hub")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hub", "weights.safetensors"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_other_ranks_wait_for_the_export(fails: bool) -> None:
    """However long it takes, and also for one that fails."""
    store, ended = HashStore(), list[int]()

    def wait() -> None:
        on_first(lambda: None, World(1, 2), store)
        ended.append(1)

    other = threading.Thread(target=wait, daemon=True)

    def write() -> None:
        other.start()
        other.join(0.5)
        assert not ended
        if fails:
            raise UserError("the disk is full")

    if fails:
        with pytest.raises(UserError, match="full"):
            on_first(write, World(0, 2), store)
    else:
        on_first(write, World(0, 2), store)
    other.join()
    assert ended == [1]
