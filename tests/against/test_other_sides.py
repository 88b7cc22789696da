"""`samestep check` beside other ranks, and another command: one against two, FSDP against DDP, a module, torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from against.plant import committed, named_by, results_of
from command import samestep
from lane_marks import FULL
from planting import Edit, plant_in_files
from samestep.records.findings import DiffResults

QUICK = ("check", "--launcher", "fork", "--steps", "4", "--json")
SCRIPT = Path(__file__).parent / "strategies.py"
ONE_RANK = ("--against-nproc", "1")
DDP = ("--against-command", "strategies.py --strategy ddp")
FSDP = "--strategy fsdp"
OF_RANK = """
    torch.manual_seed(dist.get_rank())
    hidden ="""
OF_PART = """torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) if args.strategy == "ddp" else [
                    p.grad.to_local().mul_(0.5 / p.grad.to_local().norm().clamp(min=0.5)) for p in model.parameters()
                ]"""


def compared(folder: Path, *words: str, edit: Edit | None = None) -> tuple[int, DiffResults]:
    """Compares the script with itself by these words, both with a change."""
    folder.mkdir()
    (folder / SCRIPT.name).write_text(SCRIPT.read_text())
    plant_in_files(folder, [edit] if edit else [], SCRIPT.name)
    done = samestep(*QUICK, "--out", "../out", *words, cwd=folder)
    assert done.stdout, done.stderr
    return done.returncode, results_of(done.stdout)


@pytest.mark.check
@pytest.mark.parametrize(
    "words",
    [(*ONE_RANK, "strategies.py"), (*DDP, *ONE_RANK, "strategies.py", *FSDP.split())],
    ids=["one rank against two", "one rank against two of FSDP"],
)
def test_the_same_batches_on_other_ranks_are_the_same_training(words: tuple[str, ...], tmp_path: Path) -> None:
    code, results = compared(tmp_path / "project", *words)
    assert code == 0, results.findings
    assert "compared_on_other_ranks" in [note.id for note in results.notes]


@pytest.mark.check
@pytest.mark.parametrize(
    ("words", "edit", "question", "cause", "step", "tensor"),
    [
        (ONE_RANK, Edit("lr=0.01", "lr=0.01 * ranks"), "rate", "steps_use_other_rates", 0, "0.weight"),
        (ONE_RANK, Edit("(loss / accumulate)", "(loss * ranks / accumulate)"), "loss", "same_rows_other_loss", 0, None),
        (ONE_RANK, Edit("micro_batch // ranks", "micro_batch"), "rows", "batch_grows_with_ranks", 0, None),
        (ONE_RANK, Edit("seed=0)", "seed=ranks)"), "rows", "rows_go_by_ranks", 0, None),
        (ONE_RANK, Edit("if args.norm", "if True"), "loss", "rows_normalised_by_rank", 0, None),
        (DDP, Edit("\n    hidden =", OF_RANK), "initial weights", "initial_weights_differ", None, "0.weight"),
        (DDP, Edit("torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)", OF_PART), "clipping", "", 0, None),
        (DDP, Edit("weight_decay=0.1", 'weight_decay=0.1 * (args.strategy == "ddp")'), "settings", "", 0, "0.weight"),
    ],
    ids=["rate", "loss", "batch", "seed", "BatchNorm", "weights by rank", "clipped in parts", "decay"],
)
def test_what_other_ranks_or_another_strategy_change_is_named(
    words: tuple[str, ...],
    edit: Edit,
    question: str,
    cause: str,
    step: int | None,
    tensor: str | None,
    tmp_path: Path,
) -> None:
    arguments = FSDP.split() if words == DDP else []
    code, results = compared(tmp_path / "project", *words, "strategies.py", *arguments, edit=edit)
    first = results.first_divergence
    assert code == 1 and first, results.findings
    assert (named_by(results), first.step) == (question, step)
    assert tensor in (None, first.tensor)
    found = next(finding for finding in results.findings if finding.divergence == first)
    assert cause in ("", found.message.id) and found.sites


@pytest.mark.check
def test_what_a_script_does_not_seed_begins_alike_on_both_sides(tmp_path: Path) -> None:
    seeded = Edit("    torch.manual_seed(0)\n", "")
    code, results = compared(tmp_path / "project", *DDP, "strategies.py", edit=seeded)
    assert code == 0, results.findings
    assert "further_apart_than_rounding" not in [note.id for note in results.notes]


@pytest.mark.check
def test_a_function_that_is_near_is_told(tmp_path: Path) -> None:
    near = Edit("cross_entropy(model(inputs)", 'cross_entropy(model(inputs) * (1 + 2e-5 * (args.strategy == "ddp"))')
    code, results = compared(tmp_path / "project", *DDP, "strategies.py", *FSDP.split(), edit=near)
    assert code == 0 and "further_apart_than_rounding" in [note.id for note in results.notes], results.findings


@pytest.mark.check
@pytest.mark.parametrize("near", [False, True], ids=["the same", "log of softmax"])
def test_other_functions_within_rounding_are_told(near: bool, tmp_path: Path) -> None:
    new = (
        "(F.cross_entropy if args.strategy == 'ddp' else lambda x, y: F.nll_loss(x.softmax(1).log(), y))(model(inputs)"
    )
    edit = Edit("F.cross_entropy(model(inputs)", new) if near else None
    code, results = compared(tmp_path / "project", *DDP, "strategies.py", *FSDP.split(), edit=edit)
    told = [note.fields for note in results.notes if note.id == "computed_by_other_functions"]
    assert code == 0, results.findings
    assert [(fields["gone"], fields["new"]) for fields in told] == [(["LogSoftmax"], ["Log", "Softmax"])] * near


@pytest.mark.check
def test_dropout_on_other_ranks_is_not_judged(tmp_path: Path) -> None:
    code, results = compared(tmp_path / "project", *ONE_RANK, "strategies.py", "--dropout", "0.1")
    answers = {finding.question: finding.message.id for finding in results.findings if finding.answer == "unknown"}
    assert code == 3 and answers["gradient"] == answers["weights"] == "each_rank_draws_its_own"


@pytest.mark.check
@pytest.mark.parametrize(
    ("words", "new", "code"),
    [
        (("--", "torchrun", "--nproc-per-node", "2", "train.py"), "(0.9, 0.99)", 1),
        pytest.param(("--", "torchrun", "--nproc-per-node", "2", "-m", "train"), "(0.90, 0.95)", 0, marks=FULL),
        pytest.param(("-m", "train"), "(0.9, 0.99)", 1, marks=FULL),
    ],
    ids=["torchrun, changed", "torchrun -m, the same", "-m, changed"],
)
def test_a_command_and_a_module_beside_a_revision(
    words: tuple[str, ...], new: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun is that of samestep's Python where the environment is not activated."""
    monkeypatch.setenv("PATH", os.defpath)
    folder = committed(tmp_path / "project")
    plant_in_files(folder, [Edit("(0.9, 0.95)", new)], "train.py")
    done = samestep(*QUICK, "--out", "../out", "--against", "main", *words, cwd=folder)
    assert done.returncode == code, done.stdout + done.stderr
    results = results_of(done.stdout)
    if code:
        assert named_by(results) == "settings" and results.changes[0].line == 42


@pytest.mark.check
def test_a_module_that_was_moved(tmp_path: Path) -> None:
    folder = committed(tmp_path / "project")
    plant_in_files(folder, [Edit("(0.9, 0.95)", "(0.9, 0.99)")], "train.py")
    (folder / "jobs").mkdir()
    (folder / "train.py").rename(folder / "jobs" / "train.py")
    done = samestep(*QUICK, "--out", "../out", "--against", "main:train", "-m", "jobs.train", cwd=folder)
    assert done.returncode == 1 and named_by(results_of(done.stdout)) == "settings", done.stdout + done.stderr
    words = ["--against", "main", "--against-command", "train.py --lr 0.002"]
    done = samestep(*QUICK, "--out", "../out2", *words, "-m", "jobs.train", cwd=folder)
    assert done.returncode == 1 and named_by(results_of(done.stdout)) == "settings", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--against-command", "", "train.py"], "--against-command '' names none"),
        (["--against-command", "'train.py", "train.py"], "--against-command: give a script"),
        (["--against-command", "other.py", "train.py"], "other.py does not exist"),
        (["--against", "main:old.py", "--", sys.executable, "train.py"], "give the whole command"),
        (["--against-nproc", "1", "--fix", "train.py"], "--fix does not go with"),
    ],
)
def test_a_mistake_of_the_other_side_is_one_sentence(words: list[str], said: str, tmp_path: Path) -> None:
    folder = committed(tmp_path / "project")
    done = samestep("check", *words, cwd=folder)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert said in done.stderr
