"""docs/security.md: each promise names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = r"`(tests/[\w/]+\.py)::(\w+)`"
PROMISES = ("Another machine of the network", "Another user of this machine", "A folder from elsewhere")


def absent(page: str) -> list[str]:
    """The tests that a page names and that do not exist."""
    missing = []
    for file, name in re.findall(NAMED, page):
        path = ROOT / file
        tests = (
            [node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
            if path.exists()
            else []
        )
        missing += [f"{file}::{name}"] if name not in tests else []
    return missing


def rows(section: str, page: str) -> list[str]:
    """The rows of the table under a heading, without its two first."""
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [line for line in text.splitlines() if line.startswith("|")][2:]


@pytest.mark.parametrize("page", ["docs/security.md", "docs/zh/security.md"])
def test_each_test_that_is_named_exists(page: str) -> None:
    assert absent((ROOT / page).read_text()) == []
    assert absent("`tests/test_security_page.py::test_none`") and absent("`tests/no.py::test_none`")


def test_each_promise_names_a_test_and_both_languages_name_the_same() -> None:
    english, chinese = ((ROOT / page).read_text() for page in ("docs/security.md", "docs/zh/security.md"))
    promises = [row for section in PROMISES for row in rows(section, english)]
    assert [row for row in promises if not re.search(NAMED, row)] == []
    assert re.findall(NAMED, english) == re.findall(NAMED, chinese)
