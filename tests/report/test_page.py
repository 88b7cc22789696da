"""The page: complete, escaped, alone in the world, and the same every time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from typing import Any

import pytest

from samestep import report

Results = dict[str, Any]
VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """The page as its tags, their attributes, and the text between them; unbalanced tags are an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def test_it_answers_first_and_tells_all(results: Results) -> None:
    html = report.html(results)
    page = Page(html)
    assert html.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert page.count("svg") == page.count("figure") == page.count("figcaption") == 3
    for said in (
        "digits on 2 ranks",
        "take the same step as one process playing 2 ranks, ddp bit for bit",
        "5,047–5,307, n=5",
        "✗ differs at step 3: loss of rank 1",
        "no-op on CPU",
        "2.302585092994046",
        "2.302585092994057",
        "averaged per rank instead of per row",
        "SGD with momentum",
        "samestep 0.1.0, Python 3.11.9, PyTorch 2.13.0",
        "x86_64, 8 cores",
        "Threads per rank: 1. Loader workers per rank: 0",
        "each leaves out its first 20 steps and times the next 60",
        "in turn with the others",
        "lr=0.05, width=64",
        "samestep compare digits --set lr=0.05 --set width=64",
        "results.json",
    ):
        assert said in page.text, said
    assert page.text.index("fastest here") < page.text.index("verdict")
    captions = html.split("<figcaption>")[1:]
    assert "n=5" in captions[0] and "95 % bootstrap interval" in captions[0] and "n=5" in captions[1]


def test_a_table_row_has_as_many_cells_as_the_heading(results: Results, proof: Results) -> None:
    for shown in (results, proof):
        table = report.html(shown).split("<table>")[1].split("</table>")[0]
        heading, *rows = table.split("<tr>")[1:]
        assert len(rows) == 9
        for row in rows:
            assert row.count("<td") + 5 * row.count('colspan="6"') == heading.count("<th ")


def test_an_engine_that_differs_shows_no_speed(results: Results) -> None:
    assert "7,111" not in report.html(results)


def test_what_users_name_is_escaped_everywhere(results: Results) -> None:
    evil = "<script>alert('1')</script>\"'&"
    results |= {"job": evil, "command": evil, "settings": {evil: evil}}
    results["machine"] |= {"host": evil, "processor": evil, "gpu": evil}
    results["same_as_one_process"]["reason"] = evil
    results["proof"]["float64_failed"] = evil
    for row in results["engines"]:
        row |= {"engine": evil, "reason": evil, "notes": [evil]}
    results["engines"][5]["first_divergence"] |= {
        "tensor": evil,
        "cause": evil,
        "expected": evil,
        "found": [evil, evil],
    }
    html = report.html(results)
    page = Page(html)
    assert page.count("script") == 0 and "<script" not in html
    assert page.text.count("alert('1')") >= 40
    assert page.count("svg") == 3


def test_it_needs_no_other_file_and_no_network(results: Results) -> None:
    html = report.html(results)
    page = Page(html)
    linked = [value for _, of in page.tags for key, value in of.items() if key.split(":")[-1] in ("src", "href")]
    assert linked.count("results.json") == 1
    assert all(value == "results.json" or (value or "").startswith("#") for value in linked)
    assert not {"script", "link", "iframe", "img", "image", "object"} & {tag for tag, _ in page.tags}
    assert "@import" not in html and "url(http" not in html
    outside = html.replace("http://www.w3.org/2000/svg", "").replace("http://www.w3.org/1999/xlink", "")
    assert "http:" not in outside and "https:" not in outside


def test_a_proof_alone_has_no_figures(proof: Results) -> None:
    page = Page(report.html(proof))
    assert page.count("svg") == 0
    assert "samples/s" not in page.text and "launches" not in page.text
    assert "rank 1 was killed (signal 9) in step 12" in page.text
    assert "How this was proven" in page.text and "differs at step 3" in page.text


def test_values_that_are_missing(results: Results) -> None:
    row = results["engines"][1]
    row |= {"ratio": None, "efficiency": None, "step_ms": None, "peak_memory_mib": None, "startup_s": None}
    row |= {"max_difference": None, "bound": None}
    results["same_as_one_process"] = None
    results["engines"][5]["first_divergence"] |= {"step": None, "rank": None, "cause": ""}
    del results["engines"][5]["first_divergence"]["training"]
    text = Page(report.html(results)).text
    assert "None" not in text and "Usual cause" not in text
    results["engines"] = results["engines"][-3:]
    assert Page(report.html(results)).count("svg") == 1  # no engine to race: the speed figure says why


def test_a_gpu_is_named_where_there_is_one(results: Results) -> None:
    assert "GPU" not in Page(report.html(results)).text
    results["machine"]["gpu"] = "NVIDIA H200"
    assert "GPU NVIDIA H200" in Page(report.html(results)).text


SCRIPT = """
import json, sys
from samestep import report
early = {"torch", "matplotlib", "jinja2", "rich"} & set(sys.modules)
assert not early, early
results = json.load(sys.stdin)
report.table(results), report.table(results), report.notes(results)
late = {"torch", "matplotlib", "jinja2"} & set(sys.modules)
assert not late, late
sys.stdout.write(report.html(results))
assert "torch" not in sys.modules and "matplotlib.pyplot" not in sys.modules
"""


@pytest.mark.parametrize("seed", ["1", "2"])
def test_another_process_writes_the_same_page_without_torch(results: Results, seed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(results),
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == report.html(results)
    assert done.stderr == ""
