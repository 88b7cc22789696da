"""The replay does not touch the recording's files, and says what it does not play; `samestep diff` compares records."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from command import samestep
from planting import Edit
from recorder.plant import checked, text_of
from samestep.commands.working_copy import copy_beside, copy_folder
from samestep.records.files import from_json
from samestep.records.findings import CheckResults, DiffResults, question_of
from samestep.records.script_plan import ScriptPlan


def answers(results: CheckResults | DiffResults) -> dict[str, str]:
    return {finding.question: finding.answer for finding in results.findings}


def test_a_replay_neither_resumes_from_the_recording_nor_writes_over_it(tmp_path: Path) -> None:
    saved = Edit("model.module.state_dict())", "model.module.state_dict(), dist.get_world_size())")
    text = text_of("noisy", saved, Edit("first, state =", "first, state, _ ="))
    results = checked(text, tmp_path, "--steps", "3")
    assert answers(results)["replayed weights"] == "right", results.findings
    assert torch.load(tmp_path / "noisy.pt")[-1] == 2


def test_models_that_step_in_turn_are_replayed_with_the_noise_of_the_ranks(tmp_path: Path) -> None:
    results = checked(text_of("gan"), tmp_path, "--steps", "4")
    assert answers(results)["replayed weights"] == "right", results.findings


@pytest.mark.check
def test_sharded_models_are_replayed_whole_and_rank_by_rank(tmp_path: Path) -> None:
    """15 rows of a weight are 8 and 7 on two ranks, and the last bias is on one of them."""
    text = text_of("fsdp2", Edit("nn.Tanh())", "nn.BatchNorm1d(15), nn.Tanh(), nn.Dropout(0.2))"))
    results = checked(text, tmp_path, "--steps", "4")
    assert answers(results).get("replayed weights") == "right", results.findings
    (gradient,) = [finding for finding in results.findings if finding.question == "replayed gradient"]
    assert gradient.message.fields["fed"].id == "fed_by_rank"


@pytest.mark.check
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_is_replayed_also_where_its_settings_name_the_batch_of_all_ranks(stage: int, tmp_path: Path) -> None:
    text = text_of(f"deepspeed_engine {stage}", Edit("config={", 'config={"train_batch_size": 30,'))
    results = checked(text, tmp_path, "--steps", "4")
    assert answers(results).get("replayed weights") == "right", results.findings


@pytest.mark.check
@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ("rows + torch.randn_like(rows)", ""),
        ("rows + torch.randn(1, 8)", "draws_for_a_whole_batch"),
        ("rows + __import__('random').gauss(0, 1)", "draws_outside_torch"),
        ("F.dropout(rows)", "draws_outside_torch"),
        ("rows.roll(1, 0)", "replay_reads_other_rows"),
    ],
)
def test_what_stands_between_loader_and_model_is_replayed_or_not_passed(rows: str, why: str, tmp_path: Path) -> None:
    """Where it is not replayed, the other questions are judged."""
    seeded = Edit("    for epoch", "    torch.manual_seed(dist.get_rank())\n    for epoch")
    results = checked(text_of("ddp", Edit("model(rows)", f"model({rows})"), seeded), tmp_path)
    last = results.findings[-1]
    assert (last.question, last.answer) == (("replay", "unknown") if why else ("replayed weights", "right")), last
    assert results.answer == "right" and (not why or last.message.fields["why"].id == why)


@pytest.mark.check
@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("(data, size, rank)", "(data, size, rank)", ""),
        ("(data, size, rank)", "(data, RANKS, rank)", "function_reads_ranks"),
        ("args=(RANKS,)", "args=(str(RANKS),)", "group_of_other_ranks"),
    ],
)
def test_a_spawned_function_is_replayed_where_spawn_alone_tells_it_the_ranks(
    old: str, new: str, why: str, tmp_path: Path
) -> None:
    text = text_of("spawned", Edit("int) -> None:", "int) -> None:\n    size = int(size)"), Edit(old, new))
    results = checked(text, tmp_path, "--steps", "3")
    last = results.findings[-1]
    assert (last.question, last.answer) == (("replay", "unknown") if why else ("replayed weights", "right")), last
    assert results.answer == "right" and (not why or last.message.fields["why"].id == why)


@pytest.mark.check
def test_no_replay(tmp_path: Path) -> None:
    results = checked(text_of("ddp"), tmp_path, "--steps", "2", "--no-replay")
    assert results.answer == "right" and not any("replay" in question for question in answers(results))
    assert not list((tmp_path / "out").glob("*.kept.pt"))


def test_the_folder_of_a_replay(tmp_path: Path) -> None:
    """Small files are copied, large ones linked; what is new or the records' is not there."""
    source, records = tmp_path / "source", tmp_path / "source" / "runs"
    records.mkdir(parents=True)
    for name, size in (("small", 10), ("large", 1 << 21), ("runs/record", 1)):
        (source / name).write_bytes(bytes(size))
    since = max(path.stat().st_ctime for path in source.iterdir()) + 1e-6
    new = source / "new"
    while not new.exists() or new.stat().st_ctime < since:
        new.write_text("")
    copy_folder(source, tmp_path / "copy", since, records)
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {"small", "large"}
    assert (tmp_path / "copy" / "large").is_symlink() and not (tmp_path / "copy" / "small").is_symlink()


@pytest.mark.parametrize(
    "line",
    [
        'sys.path.append("..")',
        "sys.path.append(os.path.dirname(os.path.dirname(__file__)))",
        'open("../data/rows.txt")',
    ],
)
def test_what_a_script_names_above_its_folder_is_there(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules of a folder on its search path, and files; what else lies there is not."""
    for name in ("project/models/net.py", "project/data/rows.txt", "project/other/notes.txt", "project/tools/train.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(line)
    monkeypatch.chdir(tmp_path / "project" / "tools")
    work = tmp_path / "copy" / "a" / "b" / "tools"
    work.mkdir(parents=True)
    copy_beside(ScriptPlan(str(tmp_path / "out"), time.time() + 9, "train.py"), work)
    there = {path.name for path in work.parent.rglob("*") if path.is_file()}
    assert there == ({"rows.txt"} if "open" in line else {"net.py"})


def test_a_file_that_a_script_names_in_a_folder_of_its_search_path_leaves_the_modules_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("project/dataset/rows.py", "project/dataset/made.jsonl", "project/trainer/train.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('sys.path.append(".."); open("../dataset/made.jsonl")')
    monkeypatch.chdir(tmp_path / "project" / "trainer")
    work = tmp_path / "copy" / "a" / "trainer"
    work.mkdir(parents=True)
    copy_beside(ScriptPlan(str(tmp_path / "out"), time.time() + 9, "train.py"), work)
    assert {path.name for path in (work.parent / "dataset").iterdir()} == {"rows.py", "made.jsonl"}


@pytest.mark.parametrize(
    ("old", "new", "question", "step"),
    [
        pytest.param(
            "import argparse\n", "import argparse  # a comment\n", "", None, marks=pytest.mark.check, id="nothing"
        ),
        pytest.param(
            "torch.manual_seed(1)\n",
            "torch.manual_seed(4)\n",
            "initial weights",
            None,
            marks=pytest.mark.check,
            id="seed",
        ),
        pytest.param("seed=3", "seed=4", "rows", 0, marks=pytest.mark.check, id="order of the rows"),
        pytest.param("targets)\n", "targets, label_smoothing=0.1)\n", "loss", 0, id="loss"),
        pytest.param("optimizer, 2, 0.5", "optimizer, 2, 0.6", "rate", 2, marks=pytest.mark.check, id="schedule"),
        pytest.param("momentum=0.9", "momentum=0.7", "settings", 0, marks=pytest.mark.check, id="optimizer"),
    ],
)
def test_two_records(tmp_path: Path, old: str, new: str, question: str, step: int | None) -> None:
    for name, script in (("one", text_of("ddp")), ("other", text_of("ddp", Edit(old, new)))):
        (tmp_path / name).mkdir()
        checked(script, tmp_path / name, "--steps", "4", "--no-replay")
    done = samestep("diff", str(tmp_path / "one" / "out"), str(tmp_path / "other" / "out"), "--json")
    results = from_json(DiffResults, json.loads(done.stdout))
    first = results.first_divergence
    assert done.returncode == int(bool(question)), results.findings
    assert question_of(results) == question
    assert first is None or step is None or first.step == step, first


@pytest.mark.parametrize(("folder", "says"), [("missing", "is not a folder"), (".", "no record")])
def test_a_folder_that_is_no_record_is_one_sentence(tmp_path: Path, folder: str, says: str) -> None:
    done = samestep("diff", str(tmp_path / folder), str(tmp_path))
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


@pytest.mark.check
def test_a_command_that_starts_its_ranks_itself(tmp_path: Path) -> None:
    """The ranks record; what they start does not; the script that the command gave them is replayed."""
    child = "    __import__('subprocess').run([__import__('sys').executable, '-c', 'print(5 + 5)'], check=True)\n"
    text = text_of("ddp", Edit("    options = parser", child + "    options = parser"))
    (tmp_path / "train.py").write_text(text)
    program = str(Path(sys.executable).parent / "torchrun")
    torchrun = [program, "--standalone", "--nproc-per-node", "2", "train.py", "--lr", "0.2"]
    line = ["check", "--steps", "3", "--json", "--out", str(tmp_path / "out"), "--", *torchrun]
    done = samestep(*line, cwd=tmp_path)
    assert done.stdout, done.stderr
    results = from_json(CheckResults, json.loads(done.stdout))
    assert results.answer == "right" and results.steps == 3, results.findings
    assert results.arguments == ["--lr", "0.2"] and answers(results)["replayed weights"] == "right"
    done = samestep("check", "--nproc", "3", "--out", str(tmp_path / "out3"), "--", *torchrun, cwd=tmp_path)
    assert done.returncode == 2 and "--nproc 2" in done.stderr


def test_a_group_of_ranks_that_never_come_is_refused(tmp_path: Path) -> None:
    """As of torch.cuda.device_count(): a replay would wait for them for half an hour."""
    opened = 'dist.init_process_group("gloo"'
    given = f'{opened}, world_size=2, rank=int(__import__("os").environ["RANK"])'
    results = checked(text_of("ddp", Edit(opened, given)), tmp_path, "--steps", "2")
    last = results.findings[-1]
    assert (results.answer, last.question, last.answer) == ("right", "replay", "unknown")
    assert last.message.fields["why"].id == "group_of_other_ranks"
