"""What users and engines may rely on, frozen: a change here is a decision."""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields
from pathlib import Path

import pytest

import samestep
from samestep.commands import cli
from samestep.training import Run

PACKAGE = Path(samestep.__file__).parent


def test_exports() -> None:
    of_jobs = [
        "Arrays",
        "Batch",
        "ByLength",
        "ImageFolder",
        "Job",
        "LRSchedule",
        "Phase",
        "Pipeline",
        "Recipe",
        "StepInfo",
        "Stream",
    ]
    of_jobs += ["Lanes", "Weighted", "Windows"]
    of_results = ["MachineOptions", "TrainingFailed", "PastRun", "UserError", "Verdict"]
    of_results += ["CheckResults", "CollectiveResults", "EvaluateResults", "CompareResults", "RunResults"]
    calls = ["collectives", "compare", "evaluate", "run", "runs", "verify", "watch"]
    assert sorted(samestep.__all__) == sorted([*of_jobs, *of_results, *calls, "__version__"])
    assert all(getattr(samestep, name).__name__ == name for name in [*of_jobs, *of_results, *calls])


def test_a_run_has_few_verbs() -> None:
    verbs = [name for name, _ in inspect.getmembers(Run, inspect.isfunction) if not name.startswith("_")]
    assert (
        " ".join(verbs) == "batches begin_averages closure loss mean_loss note_loss observations register release step"
    )


def test_commands() -> None:
    names = [command.name or command.callback.__name__ for command in cli.app.registered_commands]
    expected = "compare verify run evaluate slurm collectives engines doctor runs check monitor diff explain eject"
    assert " ".join(names) == expected


def test_a_job_needs_five_fields() -> None:
    """`criterion` and `optimizer` have defaults for jobs with phases; a job without these needs them all the same."""
    needed = ["model", "criterion", "optimizer", "train", "global_batch"]
    assert [field.name for field in fields(samestep.Job)][:5] == needed
    optimizer = samestep.Recipe(type("SGD", (), {}))
    given = {"model": dict, "criterion": max, "optimizer": optimizer, "train": [1], "global_batch": 1}
    samestep.Job(**given)
    for name in needed[1:]:
        with pytest.raises(samestep.UserError, match=f"^{name} is "):
            samestep.Job(**{key: value for key, value in given.items() if key != name})


def test_engines_stay_short() -> None:
    for path in (PACKAGE / "engines").glob("*.py"):
        if path.stem != "__init__":
            functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
            (lines,) = [(node.end_lineno or 0) - node.lineno + 1 for node in functions if node.name == "train"]
            assert 8 <= lines <= 60, f"{path.stem}: {lines} lines of loop"
