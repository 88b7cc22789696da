"""Which of the changed lines are told first. It needs no torch."""

from __future__ import annotations

import pytest

from samestep.judge.changed_lines import changed_lines
from samestep.message import message
from samestep.records.call_site import CallSite
from samestep.records.findings import Finding, Question

BEFORE = """import torch
sampler = Sampler(data, seed=0)
images = load()


model = Model(width=16)
print(images)


optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)


# the loop
for x in images:
    loss = model(x).sum()
"""
AFTER = (
    BEFORE.replace("images", "pictures")
    .replace("lr=0.1, momentum=0.9", "lr=0.2, momentum=0.8")
    .replace("# the loop", "# all rows")
    .replace("seed=0", "seed=1")
    .replace("width=16", "width=8")
)


def places(question: Question, after: str = AFTER, name: str = "", sites: tuple[CallSite, ...] = ()) -> list[str]:
    finding = Finding(question, "differs", message("optimizer_set_otherwise", name=name))
    return [place.text for place in changed_lines({"t.py": BEFORE}, {"t.py": after}, finding, sites, sites)]


@pytest.mark.parametrize(
    ("question", "line"), [("rows", "+sampler = Sampler(data, seed=1)"), ("rate", "lr=0.2"), ("settings", "lr=0.2")]
)
def test_lines_of_what_differs_come_first(question: Question, line: str) -> None:
    shown = places(question, name="momentum" if question == "settings" else "")
    assert line in shown[0]
    assert "# all rows" in shown[-1] or "in pictures" in shown[-1], shown


def test_of_lines_that_nothing_tells_apart_the_nearest_comes_first() -> None:
    assert "width=8" in places("saves", sites=(CallSite("t.py", 6),))[0]
    assert "lr=0.2" in places("saves", sites=(CallSite("t.py", 10),))[0]


def test_names_that_the_script_gives_come_last_and_others_do_not() -> None:
    renamed = BEFORE.replace("images", "pictures").replace("SGD(", "Adam(")
    assert "Adam(" in places("saves", renamed)[0]


def test_a_file_that_was_moved_is_compared_with_what_it_was() -> None:
    (place,) = changed_lines({"a.py": BEFORE}, {"in/b.py": BEFORE.replace("seed=0", "seed=1")}, None)
    assert (place.before, place.after, place.line) == ("a.py", "in/b.py", 2)
    assert changed_lines({"a.py": BEFORE}, {"b.py": BEFORE}, None) == []


def test_new_and_removed_files_are_places() -> None:
    new, gone = changed_lines({"a.py": "x = 1\n"}, {"b.py": "y = 2\n"}, None)
    assert {(new.before, new.after), (gone.before, gone.after)} == {("a.py", ""), ("", "b.py")}
