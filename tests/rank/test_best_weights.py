"""Evaluation while a training runs: its curve, the best weights, an early end; and weights to start from."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from command import TESTS, samestep
from command import WATCHED as JOBS
from conformance.jobs_job import averaged
from said import says
from samestep.commands.progress import Training
from samestep.commands.run import count_evaluated_rows
from samestep.errors import TrainingFailed
from samestep.rank.evaluate import BestWeights, _better
from samestep.rank.weights import save
from samestep.records.files import read
from samestep.records.record import Progress, RankError
from samestep.records.training_record import EvaluationRecord, TrainingRecord
from samestep.world import World

MANY = ["--set", "many=true"]  # metrics of torchmetrics'


def run(out: Path, *words: str, engine: str = "ddp", nproc: int = 2) -> dict[str, Any]:
    launched = ["--nproc", str(nproc)] if engine != "single" else []
    done = samestep("run", f"{JOBS}:job", "--engine", engine, *launched, "--json", "--out", str(out), *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("trained") / "out"
    return out, run(out, *MANY)


def test_the_curve_is_the_same_on_any_number_of_ranks(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    curve = trained[1]["curve"]
    assert [entry["step"] for entry in curve] == [5, 10, 15, 20]
    for nproc in (1, 3):
        other = run(tmp_path / str(nproc), *MANY, nproc=nproc)["curve"]
        for entry, twin in zip(curve, other, strict=True):
            assert twin == pytest.approx(entry, rel=1e-5)


def test_watching_does_not_change_the_training(tmp_path: Path) -> None:
    """Not even what dropout draws, though building the model that is evaluated seeds torch."""
    drops = ["--set", "dropout=0.5", "--evaluate-every"]
    found = {every: run(tmp_path / every, *drops, every, engine="single") for every in ("0", "1")}
    assert [[entry["step"] for entry in each["curve"]] for each in found.values()] == [[20], [5, 10, 15, 20]]
    blind, watched = ((tmp_path / every / "weights.safetensors").read_bytes() for every in found)
    assert blind == watched


def test_evaluations_by_steps_and_a_training_of_so_many_steps(tmp_path: Path) -> None:
    """Of 7 steps, an epoch's being 5: instead of after epochs, besides them, and the best is kept."""
    seven = ["--set", "max_steps=7", "--set", "grows=true", "--evaluate-steps", "2", "--best", "loss"]
    found = {more: run(tmp_path / more, *seven, *more.split()) for more in ("", "--evaluate-every 1")}
    curves = [[entry["step"] for entry in each["curve"]] for each in found.values()]
    assert curves == [[2, 4, 6, 7], [2, 4, 5, 6, 7]]
    assert all(each["steps"] == each["asked_steps"] == 7 for each in found.values())
    assert found[""]["weights_of_step"] == min(found[""]["curve"], key=lambda entry: entry["loss"])["step"]


@pytest.mark.parametrize("save", ["all", "trainable"])
def test_averaged_weights_are_evaluated_and_saved(save: str, tmp_path: Path) -> None:
    """With a decay of almost 1 they stay where they began, of which a file without the frozen part needs the rest."""
    job = f"{TESTS}/conformance/jobs_job.py:averaged"
    said = ["--nproc", "2", "--set", "ema=0.999999", "--set", f"save={save}", "--json"]
    done = samestep("run", job, *said, "--set", "max_steps=7", "--evaluate-steps", "3", out=tmp_path / "out")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [entry["step"] for entry in found["curve"]] == [3, 6, 7]
    file = Path(found["weights"])
    tensors, start = load_file(file), averaged(save="all").model().state_dict()
    names = {name for name in start if save == "all" or not name.startswith("frozen")}
    assert {*tensors} == names
    weights = [name for name in names if "running" not in name and "batches" not in name]
    assert all(torch.allclose(tensors[name], start[name], atol=1e-5) for name in weights)
    scored = samestep("evaluate", job, "--weights", str(file), "--nproc", "1", "--json")
    assert json.loads(scored.stdout)["evaluation"] == pytest.approx(found["evaluation"], rel=1e-6)


ENGINES = ["ddp", "fsdp", "lightning", "zero", "single"]
CHECKED = ["accelerate", "deepspeed", "fabric", "hf"]


@pytest.mark.check
@pytest.mark.parametrize("engine", [*ENGINES, *(pytest.param(name, marks=pytest.mark.check) for name in CHECKED)])
def test_the_best_weights_are_kept_and_patience_ends(engine: str, tmp_path: Path) -> None:
    """The learning rate grows until the loss does: the best is not the last."""
    more = ["--set-engine", "stage=3"] if engine == "deepspeed" else []
    found = run(tmp_path / "out", "--set", "grows=true", "--best", "loss", "--patience", "2", *more, engine=engine)
    losses = [entry["loss"] for entry in found["curve"]]
    best = int(np.argmin(losses))
    assert found["stopped"] == "early" and found["steps"] < found["asked_steps"]
    assert found["weights_of_step"] == found["curve"][best]["step"] == 5 * (best + 1)
    assert found["steps"] == 5 * (best + 3) + 1  # the last step that every engine can still agree on
    assert found["curve"][-1]["step"] == 5 * (best + 3)  # which is not evaluated: its weights are nobody's wish
    scored = samestep("evaluate", f"{JOBS}:job", "--weights", found["weights"], "--nproc", "1", "--json")
    assert json.loads(scored.stdout)["evaluation"]["loss"] == pytest.approx(losses[best], rel=1e-6)


def test_a_training_starts_from_weights(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    weights = trained[0] / "weights.safetensors"
    found = run(tmp_path / "out", "--init", str(weights), *MANY, "--set", "lr=0.0")
    assert found["evaluation"] == trained[1]["evaluation"]
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert found["init"] == {"file": str(weights), "sha256": digest}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--init", "nowhere"], "--init nowhere: there is no such file"),
        (["--init", "WEIGHTS", "--set", "width=9"], "0.weight has shape [4, 6] in the file and [9, 6] in the model"),
        (["--init", "WEIGHTS", "--set", "bias=false"], "the model has no 0.bias"),
        (["--init", str(JOBS)], "cannot be read as safetensors"),
        (["--best", "acuracy"], "the job has no such metric; did you mean 'accuracy'?"),
        (["--best", ":min"], "--best :min: no metric is named"),
        (["--best", "accuracy:up"], "'up' is neither min nor max"),
        (["--patience", "2"], "name it with --best"),
        (["--best", "loss", "--evaluate-every", "0"], "need evaluations"),
        (["--best", "loss", "--set", "evaluated=false"], "the job has no evaluation that computes it"),
        (["--set", "metric=loss"], "a metric is called 'loss', a name that the evaluation curve uses itself"),
        (["--set", "metric=wide"], "the metric 'accuracy' returned a tensor of shape [4, 4] for 4 rows"),
        ([*MANY, "--set", "metric=matrix"], "the metric 'matrix' is not a single number; give it an average"),
    ],
)
def test_bad_wishes_are_one_sentence(
    words: list[str], says: str, trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    words = [str(trained[0] / "weights.safetensors") if word == "WEIGHTS" else word for word in words]
    done = samestep("run", f"{JOBS}:job", "--nproc", "2", "--out", str(tmp_path / "out"), *words)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "out/weights.safetensors").exists()


def test_an_evaluation_that_fails_does_not_cost_the_training(tmp_path: Path) -> None:
    words = ["--nproc", "2", "--set", "breaks=true", "--evaluate-every", "0", "--out", str(tmp_path / "out")]
    done = samestep("run", f"{JOBS}:job", *words)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    errors = [read(RankError, file) for file in (tmp_path / "out").rglob("error-rank*.json")]
    (error,) = [error for error in errors if not error.lost_peer]
    place = {"step": None, "place": "sample 100", "error": "ValueError: a bad shard"}
    says(error.message, "rows_not_loaded", **place)
    assert (tmp_path / "out" / "weights.safetensors").exists()


def test_what_cannot_be_evaluated_is_one_sentence(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    weights = str(trained[0] / "weights.safetensors")
    for words, sentence in (
        (["--set", "evaluated=false"], "the job has no evaluation"),
        (["--predictions", "/proc/out.npy"], "--predictions /proc/out.npy cannot be written"),
        (["--predictions", weights], "weights.safetensors exists, and would be replaced"),
        (["--predictions", "out.txt"], "--predictions out.txt: give a file that ends in .npy"),
    ):
        done = samestep("evaluate", f"{JOBS}:job", "--weights", weights, "--nproc", "1", *words)
        assert done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr, done.stderr


NAN = float("nan")


@pytest.mark.parametrize(
    ("new", "old", "way", "better"),
    [
        (0.5, 0.4, "max", True),
        (0.4, 0.5, "max", False),
        (0.4, 0.5, "min", True),
        (0.5, 0.5, "min", False),  # of equals the first is kept
        (0.5, 0.5, "max", False),
        (0.5, NAN, "max", True),
        (NAN, 0.5, "min", False),
        (NAN, NAN, "min", False),
    ],
)
def test_what_is_better(new: float, old: float, way: str, better: bool) -> None:
    assert _better({"x": new}, {"x": old}, "x", way) is better


def test_the_record_must_show_each_row_once(tmp_path: Path) -> None:
    def record(*of_ranks: list[int]) -> Any:
        evaluated = [TrainingRecord(evaluation=EvaluationRecord(3, 3.0, {}, indices=indices)) for indices in of_ranks]
        ranks = [SimpleNamespace(world=World(size=len(of_ranks)))] * len(of_ranks)
        return SimpleNamespace(training=lambda name: evaluated, ranks=ranks, folder=tmp_path)

    assert count_evaluated_rows(record([0, 1], [2]), "run", 3) == 3
    for wrong in (([0, 1], [1]), ([0, 1], [1, 2]), ([0], [1])):
        with pytest.raises(TrainingFailed, match="not each once"):
            count_evaluated_rows(record(*wrong), "run", 3)


def test_evaluation_is_the_same_to_the_last_digit(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Of torchmetrics' own too; 131 rows, that no number of ranks shares evenly."""
    weights, found = str(trained[0] / "weights.safetensors"), []
    for nproc in (1, 2, 3):
        kept = ["--predictions", str(tmp_path / f"{nproc}.npy"), "--out", str(tmp_path / str(nproc))]
        done = samestep("evaluate", f"{JOBS}:job", "--weights", weights, "--nproc", str(nproc), "--json", *MANY, *kept)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    names = {"loss", "accuracy", "top2", "f1", "auroc", "perplexity"}
    assert set(found[0]["evaluation"]) == names
    assert all(each["evaluation"] == found[0]["evaluation"] for each in found)
    assert found[0]["evaluation"] == trained[1]["evaluation"]
    outputs = [np.load(tmp_path / f"{nproc}.npy") for nproc in (1, 2, 3)]
    assert outputs[0].shape == (131, 3)
    assert all((each == outputs[0]).all() for each in outputs)
    # The same as torchmetrics and numpy make of the outputs at once, in the dataset's order.
    import torch
    from torchmetrics.functional.classification import multiclass_auroc, multiclass_f1_score

    labels = torch.arange(131) % 3
    whole = torch.from_numpy(outputs[0])
    assert found[0]["evaluation"]["accuracy"] == float((whole.argmax(1) == labels).double().mean())
    assert found[0]["evaluation"]["f1"] == float(multiclass_f1_score(whole, labels, 3))
    assert found[0]["evaluation"]["auroc"] == float(multiclass_auroc(whole, labels, 3))


def test_a_folder_of_one_evaluation_is_not_anothers(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    weights = trained[0] / "weights.safetensors"
    other = tmp_path / "other.safetensors"
    save({name: tensor + 1 for name, tensor in load_file(weights).items()}, other)
    words = ["evaluate", f"{JOBS}:job", "--nproc", "1", "--out", str(tmp_path / "out"), "--weights"]
    assert samestep(*words, str(weights)).returncode == 0
    before = (tmp_path / "out" / "results.json").read_bytes()
    again = samestep(*words, str(other))
    assert again.returncode == 2 and "init_sha256=" in again.stderr
    assert (tmp_path / "out" / "results.json").read_bytes() == before


def test_an_evaluation_is_due_after_every_so_many_epochs_but_not_at_the_end() -> None:
    def due(every: int) -> list[int]:
        watch = BestWeights(None, World(), 30, Path(), every)  # type: ignore[arg-type]
        return [done for done in range(1, 31) if watch.is_due(done, 5)]

    assert (due(0), due(1), due(2), due(4)) == ([], [5, 10, 15, 20, 25], [10, 20], [20])


def test_without_a_terminal_a_line_tells_now_and_then_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Progress("run", done=12, steps=40, samples=1536, loss=0.25)
    for every_s, lines in ((0.0, 1), (60.0, 0)):
        monkeypatch.setattr(Training, "PRINT_EVERY_S", every_s)
        with Training("digits on ddp", tmp_path, "torchrun") as progress:
            progress.show(told)
        said = capsys.readouterr().err
        line = "samestep: digits on ddp: step 12 of 40  1,536 samples  loss 0.2500"
        assert said.count(line) == lines
