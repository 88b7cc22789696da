"""Tolerances stand in one table, samestep/bounds.py, with what each was taken from, and nowhere else in the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from samestep import bounds

SOURCE = Path(bounds.__file__).parent
# The rooms that compare numbers of trainings.
ROOMS = ("commands", "data", "proof", "rank", "recorder", "reference", "tasks")
SMALL = 1e-2
# What is as small, and no tolerance: (file, the text of the number).
OTHER_NUMBERS = {
    # The default rate of torch's Adam.
    ("reference/hypotheses.py", "1e-3"),
    ("tasks/proof_job.py", "1e-3"),
    # The default of torch's normalisations.
    ("reference/held_randomness.py", "1e-5"),
    # Of costs: equal ones are divided evenly.
    ("parallel/stage_plan.py", "1e-6"),
    ("parallel/stage_plan.py", "1e-3"),
    # Seconds.
    ("tasks/collectives/__init__.py", "1e-9"),
    ("commands/needs.py", "30e-9"),
}
BOUNDS = {name for name in vars(bounds) if name.isupper()}
TOLERANCES = ("rel_tol", "abs_tol", "rtol", "atol", "tolerance")


def numbers_of(file: Path) -> Iterator[tuple[str, int]]:
    """Yields the text and the line of each number that is a tolerance, as small as one, or a multiple of a bound."""
    text = file.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.keyword) and node.arg in TOLERANCES and isinstance(node.value, ast.Constant):
            if node.value.value:
                yield ast.get_source_segment(text, node.value) or "", node.value.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, float) and 0 < node.value <= SMALL:
            number = ast.get_source_segment(text, node) or ""
            if "e-" in number:
                yield number, node.lineno
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
            pairs = (node.left, node.right), (node.right, node.left)
            if any(isinstance(number, ast.Constant) and BOUNDS & names_in(bound) for number, bound in pairs):
                yield ast.get_source_segment(text, node) or "", node.lineno


def names_in(expression: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}


def test_no_tolerance_stands_elsewhere() -> None:
    found = set()
    for room in ROOMS:
        for file in (SOURCE / room).rglob("*.py"):
            name = str(file.relative_to(SOURCE))
            found |= {(name, number, line) for number, line in numbers_of(file) if (name, number) not in OTHER_NUMBERS}
    assert not found, "a tolerance belongs into samestep/bounds.py"


def test_each_bound_says_what_it_was_taken_from() -> None:
    text = Path(bounds.__file__).read_text()
    for block in re.findall(r"((?:^# .*\n)*)^[A-Z][A-Z_0-9, ]* = ", text, flags=re.MULTILINE):
        assert block, "a bound without a comment"
    used = "".join(file.read_text() for file in SOURCE.rglob("*.py") if file.name != "bounds.py")
    assert [name for name in BOUNDS if not re.search(rf"\b{name}\b", used)] == []
