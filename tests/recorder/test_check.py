"""`samestep check`: healthy scripts are right, each planted fault is caught and named, and nothing is left behind."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from command import samestep
from lane_marks import CHECK, FULL, first_of_each, in_turn
from planting import Edit
from ranks import skip_unless_here
from recorder.faults import FAULTS, HEALTHY, Fault
from recorder.plant import checked, row_of, text_of
from recorder.replay_faults import REPLAY_FAULTS
from recorder.test_replay import answers
from samestep.message import message
from samestep.records.files import read
from samestep.records.findings import question_of
from samestep.records.script import CLOSURES, ClosureRecord
from samestep.records.script_plan import PLAN
from samestep.report.language import text

STAGES = [each for each in FAULTS if each.script.startswith("deepspeed") and each.name != "divided by hand, too"]
TRIED = [each for each in (*FAULTS, *REPLAY_FAULTS) if each not in STAGES]  # tests/recorder/plant.py tries all
# Of each answer one fault: the others are the same in other scripts, each of which is checked without a fault.
CHECKED = first_of_each(TRIED, lambda fault: (fault.question, fault.cause))
IN_THE_FAST_LANE = [("ddp", "forward through .module"), ("ddp", "set_epoch left out")]
IN_THE_FAST_LANE += [("accumulate", "not divided"), ("fsdp2", "not divided")]


def lane_of(fault: Fault) -> tuple[pytest.MarkDecorator, ...]:
    if (fault.script, fault.name) in IN_THE_FAST_LANE:
        return ()
    return (in_turn(2, CHECKED.index(fault)) if fault in CHECKED else FULL,)


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=() if name == "ddp" else in_turn(4, n)) for n, name in enumerate(HEALTHY)]
)
def test_a_healthy_script_is_right(script: str, tmp_path: Path) -> None:
    if script == "horovod_loop":
        skip_unless_here("horovod")
    results = checked(text_of(script), tmp_path)
    assert results.answer == "right", results.findings
    assert results.steps >= 8


@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, id=each.name, marks=lane_of(each)) for each in TRIED],
)
def test_a_planted_fault_is_caught_and_named(fault: Fault, tmp_path: Path) -> None:
    if fault.script == "horovod_loop":
        skip_unless_here("horovod")
    results = checked(text_of(fault.script, fault), tmp_path)
    row = row_of(fault.script, results, fault)
    assert row.caught and row.named, (row, results.findings)


@pytest.mark.check
@pytest.mark.parametrize(("share", "answer"), [("labelled[rank::size]", "unknown"), ("labelled", "differs")])
def test_ranks_that_share_a_graph_train_other_nodes(share: str, answer: str, tmp_path: Path) -> None:
    results = checked(text_of("whole_graph", Edit("labelled[rank::size]", share)), tmp_path)
    assert (results.answer, question_of(results)) == (answer, "rows" if answer == "differs" else "")
    assert results.missing == ["rows"]


@pytest.mark.check
def test_three_ranks(tmp_path: Path) -> None:
    assert checked(text_of("ddp"), tmp_path, nproc=3).answer == "right"


@pytest.mark.check
def test_the_script_under_torchrun_prints_its_verdict_and_ends(tmp_path: Path) -> None:
    """In the user's folder; no line of the script runs after the steps that were asked; no process is left."""
    script = tmp_path / "train.py"
    script.write_text(text_of("ddp", Edit("    dist.destroy", "    open('done', 'w').close()\n    dist.destroy")))
    done = samestep("check", "--steps", "3", "--out", str(tmp_path / "out"), "train.py", "--lr", "0.3", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "train.py" in done.stdout and "nothing wrong" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "out"}
    left = [each for each in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(each.info["cmdline"] or ())]
    assert not left


def test_an_option_after_the_script_is_said(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('no training')")
    done = samestep("check", "--launcher", "fork", "train.py", "--steps", "9", "--lr", "1", cwd=tmp_path)
    assert "--steps comes" in done.stderr and "--lr comes" not in done.stderr


CLOSURE = """
            def closure():
                loss = F.cross_entropy(model(rows), targets)
                optimizer.zero_grad()
                loss.backward()
                return loss
            loss = optimizer.step(closure)
"""
OF_ALL_RANKS = """                loss = loss.detach()
                dist.all_reduce(loss)
                return loss / dist.get_world_size()
"""


def by_closure(optimizer: str, returned: str = "                return loss\n") -> str:
    text = text_of("ddp", Edit("SGD(model.parameters(), lr=options.lr, momentum=0.9)", optimizer))
    begin, end = text.index("            loss = F.cross"), text.index("            schedule.step()")
    return text[:begin] + CLOSURE.replace("                return loss\n", returned) + text[end:]


def test_an_optimizer_with_a_closure_is_replayed_to_its_weights(tmp_path: Path) -> None:
    results = checked(by_closure("LBFGS(model.parameters(), 0.1, 3)"), tmp_path, "--steps", "3")
    assert answers(results)["replayed weights"] == "right", results.findings


@pytest.mark.parametrize(
    "search", [pytest.param("", marks=CHECK), pytest.param(', line_search_fn="strong_wolfe"', marks=FULL)]
)
def test_a_closure_that_the_ranks_call_unequally_often_is_named(search: str, tmp_path: Path) -> None:
    """One rank ends before the other, whose next reduction then fails: no more than a closed connection was said.

    At which step the line search comes apart is a matter of rounding, and so of the processor: the counts tell it.
    """
    (tmp_path / "train.py").write_text(by_closure(f"LBFGS(model.parameters(){search})"))
    done = samestep("check", "--launcher", "fork", "--out", str(tmp_path / "out"), "train.py", cwd=tmp_path)
    said = " ".join(done.stderr.split())
    calls = [read(ClosureRecord, tmp_path / "out" / CLOSURES.format(rank)).calls for rank in range(2)]
    step, (first, second) = next((i, both) for i, both in enumerate(zip(*calls, strict=False)) if both[0] != both[1])
    assert f"step {step} ({first} on rank 0, {second} on rank 1)" in said, (said, calls)
    assert done.returncode == 1 and "closure" in said and "onnection" not in said


@pytest.mark.check
def test_a_rank_that_never_steps_is_named(tmp_path: Path) -> None:
    """The other ends its recorded steps first: no more than a closed connection was said."""
    never = Edit("optimizer.step()", "dist.get_rank() or optimizer.step()")
    (tmp_path / "train.py").write_text(text_of("ddp", never))
    done = samestep("check", "--launcher", "fork", "--steps", "2", "--out", "out", "train.py", cwd=tmp_path)
    said = " ".join(done.stderr.split())
    assert done.returncode == 1 and text(message("rank_took_only", rank=1, steps=0), "en") in said, said
    assert "onnection" not in said


@pytest.mark.check
def test_a_line_search_by_the_mean_of_all_ranks_is_right(tmp_path: Path) -> None:
    text = by_closure('LBFGS(model.parameters(), line_search_fn="strong_wolfe")', OF_ALL_RANKS)
    results = checked(text, tmp_path, "--steps", "3")
    assert results.answer == "right", results.findings


def test_a_module_is_checked(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "settings.py").write_text("RATE = 0.3\n")
    imported = Edit("import torch\n", "import torch\n\nfrom .settings import RATE\n")
    (package / "train.py").write_text(text_of("ddp", imported, Edit("=0.1", "=RATE")))
    line = ["check", "--launcher", "fork", "--steps", "2", "--out", str(tmp_path / "out"), "-m", "package.train"]
    done = samestep(*line, "--lr", "0.2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "package.train" in done.stdout and "nothing wrong" in done.stdout
    assert "replayed gradient" in done.stdout
    missing = samestep("check", "--launcher", "fork", "--out", str(tmp_path / "no"), "-m", "package.no", cwd=tmp_path)
    assert missing.returncode == 2
    assert "module package.no" in missing.stderr and "Traceback" not in missing.stderr


@pytest.mark.check
def test_a_module_of_a_command_is_checked(tmp_path: Path) -> None:
    (tmp_path / "train_it.py").write_text(text_of("ddp"))
    out = ["check", "--steps", "2", "--out", str(tmp_path / "out"), "--", sys.executable]
    done = samestep(*out, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "train_it", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing wrong" in done.stdout


@pytest.mark.check
def test_a_script_that_starts_other_ranks_names_their_number(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text_of("spawned"))
    line = ["check", "--nproc", "3", "--launcher", "fork", "--out", str(tmp_path / "out"), "train.py"]
    done = samestep(*line, cwd=tmp_path)
    assert done.returncode == 2
    assert "--nproc 2" in " ".join(done.stderr.split())


@pytest.mark.check
def test_the_ranks_of_a_tensor_parallel_model_may_read_the_same_rows(tmp_path: Path) -> None:
    results = checked(text_of("tensor_parallel"), tmp_path)
    found = answers(results)
    assert results.answer == "right" and results.steps >= 8, results.findings
    assert {found[name] for name in ("rows", "gradient", "weights", "replayed gradient")} == {"right"}, found


def test_what_cannot_be_judged_is_not_passed(tmp_path: Path) -> None:
    script = tmp_path / "idle.py"
    script.write_text("print('trains nothing')\n")
    done = samestep("check", "--launcher", "fork", "--out", str(tmp_path / "out"), str(script))
    assert done.returncode == 3
    assert "unknown" in done.stdout and "under torchrun" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["missing.py"], 2, "missing.py does not exist"),
        (["--launcher", "srun", "x.py"], 2, "--launcher 'srun'"),
        (["--nproc", "100000", "x.py"], 2, "give at most"),
        (["--launcher", "fork", "x.py"], 1, "sys.exit(3)"),
        (["--", "sh", "-c", "exit 0"], 1, "no rank"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], code: int, says: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("raise SystemExit(3)\n")
    done = samestep("check", "--out", str(tmp_path / "out"), *words, cwd=tmp_path)
    assert done.returncode == code
    assert says in done.stderr and "Traceback" not in done.stderr


def test_a_check_is_no_rank_and_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.py").touch()
    (tmp_path / PLAN).touch()
    done = samestep("check", "--out", str(tmp_path), "x.py", cwd=tmp_path)
    assert done.returncode == 2 and "another check" in done.stderr
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = samestep("check", "x.py", cwd=tmp_path)
    assert done.returncode == 2 and "RANK and WORLD_SIZE" in done.stderr
