"""Asks of many odd jobs whether N ranks train them as one process does, and compares with the answers that are right.

    python benchmarks/odd_jobs.py [--out FOLDER] [--ranks 2] [--only WORDS]

The reference alone answers this question, for every engine; it is played here in this process, job after job. Exit 0
when every answer is right. Each job's docstring in tests/one_process_jobs begins with its answer:
"yes", "as expected", "no ID" with the mistake's id, or "not known".
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from samestep.message import Message
from samestep.proof.one_process import one_process
from samestep.proof.plan import held_layouts
from samestep.proof.trace import Expectation
from samestep.records.inspection import Question
from samestep.records.plan import LayoutPlan, ReferencePlan
from samestep.records.results import OneProcess
from samestep.tasks.inspect.job import inspect_job
from samestep.tasks.play_reference import play_reference
from samestep.world import World

JOBS = Path(__file__).parents[1] / "tests" / "one_process_jobs"
FILES = ("alike", "random_numbers", "mistakes")
WORDS = {"yes": "yes", "as expected": "no, as expected", "no": "no", "not known": "not known"}


def answer(target: str, replicas: int) -> OneProcess:
    """Returns what `verify` answers for a job, as the reference alone decides it."""
    facts = inspect_job(Question(target, proves=True), replicas, "cpu")

    def play(*layouts: LayoutPlan) -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            plan = ReferencePlan(
                folder,
                0.0,
                target,
                {},
                layouts,
                facts.proof.steps,
                replicas,
                rows=facts.proof.rows,
                extremes=facts.proof.extremes,
            )
            record: Any = SimpleNamespace(ranks=[SimpleNamespace(layouts=play_reference(plan, World()))])
        return [Expectation(record, number) for number in range(len(layouts))]

    one = LayoutPlan(trainings=("sgd",), compared=True)
    single, ranks = play(one, LayoutPlan(replicas=replicas, trainings=("sgd",), compared=True))

    def held(constant: bool) -> tuple[Expectation, Expectation]:
        alone, together = play(*held_layouts(ranks.facts, constant=constant))
        return alone, together

    return one_process(ranks, single, held, facts)


def expected_of(job: Any) -> tuple[str, str]:
    """The answer in a job's docstring, and the id of the mistake."""
    line = job.__doc__.splitlines()[0].split(":")[0]
    word = next(word for word in WORDS if line == word or (word == "no" and line.startswith("no ")))
    return WORDS[word], line[3:] if word == "no" else ""


def odd_jobs() -> Iterator[tuple[str, Any]]:
    """Yields each job's target, as the command takes it, and its function."""
    sys.path.insert(0, str(JOBS.parent))
    for file in FILES:
        before = set(importlib.import_module("one_process_jobs.parts").ODD)
        module = importlib.import_module(f"one_process_jobs.{file}")
        for name in [name for name in module.ODD if name not in before]:
            yield f"{JOBS / file}.py:{name}", module.ODD[name]


def row_of(target: str, job: Any, ranks: int) -> dict[str, Any]:
    expected, mistake = expected_of(job)
    began = time.process_time()
    row: dict[str, Any] = {"job": target.rpartition(":")[2], "ranks": ranks, "expected": expected, "mistake": mistake}
    try:
        found = answer(target, ranks)
    except Exception as error:
        said = getattr(error, "message", None)
        text = said.id if isinstance(said, Message) else f"{type(error).__name__}: {error}"
        return row | {"answer": "error", "reason": text, "right": False, "cpu_s": time.process_time() - began}
    reason = found.reason.id if found.reason else ""
    right = found.answer == expected and (not mistake or reason == mistake)
    row |= {"answer": found.answer, "reason": reason, "max_difference": found.max_difference, "right": right}
    return row | {"cpu_s": round(time.process_time() - began, 2)}


def summary(rows: list[dict[str, Any]]) -> str:
    """How many answers are right, and how many comfort or alarm falsely."""
    comfort = sum(row["answer"] in ("yes", "no, as expected") and row["expected"] == "no" for row in rows)
    comfort += sum(row["answer"] == "yes" and row["expected"] != "yes" for row in rows)
    alarm = sum(row["answer"] == "no" and row["expected"] in ("yes", "no, as expected") for row in rows)
    return f"{len(rows)} jobs: {sum(row['right'] for row in rows)} right, {comfort} false yes, {alarm} false no"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="keep every row in this folder")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--only", default="", help="jobs with this in their name")
    options = parser.parse_args()
    rows = []
    for ranks in options.ranks:
        for target, job in odd_jobs():
            if options.only not in target:
                continue
            rows.append(row := row_of(target, job, ranks))
            print(
                f"{'right' if row['right'] else 'WRONG':6} {row['cpu_s']:6.2f} s  {row['job']}: {row['answer']}", end=""
            )
            print(f" ({row['reason']})" if row["reason"] else "", flush=True)
    print(summary(rows))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "rows.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
