"""The page: it is complete, escapes what it shows, needs no other file, and has the same bytes every time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import golden_file
import pytest
from example_results import unmeasured, with_divergence, with_row

from budget import budget
from samestep import report
from samestep.message import as_said, message
from samestep.records.monitor import GpuSummary, MonitorSummary
from samestep.records.results import CompareResults, Inexactness, OneProcess, Proof, results_json
from samestep.report import verdicts
from samestep.report.language import LANGUAGES, VARIABLE, Language, language

VOID = {"meta", "br", "link", "img", "hr", "input"}


GPU = GpuSummary(0.87, 12 << 30, None, 250.0, None, 61.0)
USAGE = MonitorSummary(8.0, 9, 1.0, 1.75, 14.0, 3 << 30, 5, 0, 0, 1.9, 4 << 30, 0, 2 << 20, 7 << 20, gpus=(GPU,))


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
        # The numbers along an axis are matplotlib's choice.
        is_tick = "svg" in self.open and data.replace(",", "").replace(".", "").isdigit()
        if "style" not in self.open and not is_tick:
            self.words.append(data)

    @property
    def lines(self) -> list[str]:
        """The text, a line for what stands between two tags."""
        lines = [" ".join(words.split()) for words in self.words]
        return [line for line in lines if line]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


@pytest.mark.parametrize("into", LANGUAGES)
def test_the_golden_file_holds_the_text_of_the_pages(
    results: CompareResults, proof: CompareResults, into: Language, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, into)
    pages = {"a comparison": with_row(results, 1, monitor=USAGE), "a proof": proof}
    said = {name: Page(report.html(shown)).lines for name, shown in pages.items()}
    golden_file.agrees(f"page.{into}", golden_file.parts(said))


def test_the_headline_comes_first_and_each_figure_has_a_caption(results: CompareResults) -> None:
    html = report.html(results)
    page = Page(html)
    assert html.startswith("<!DOCTYPE html>") and f'<html lang="{language()}">' in html
    assert page.count("svg") == page.count("figure") == page.count("figcaption") == 3
    assert page.text.index(verdicts.headline(results)) < page.text.index(verdicts.verdict_text(results.engines[0]))


def test_a_table_row_has_as_many_cells_as_the_heading(results: CompareResults, proof: CompareResults) -> None:
    for shown in (results, proof):
        table = report.html(shown).split("<table>")[1].split("</table>")[0]
        heading, *rows = table.split("<tr>")[1:]
        assert len(rows) == 9
        for row in rows:
            spanned = sum(int(columns) - 1 for columns in re.findall(r'colspan="(\d+)"', row))
            assert row.count("<td") + spanned == heading.count("<th ")


def test_an_engine_that_differs_shows_no_speed(results: CompareResults) -> None:
    assert "7,111" not in report.html(results)


def test_what_users_name_is_escaped_everywhere(results: CompareResults) -> None:
    evil = "<script>alert('1')</script>\"'&"
    results = with_divergence(results, tensor=evil, cause=as_said(evil), expected=evil, found=[evil, evil])
    results = replace(
        results,
        job=evil,
        command=evil,
        settings={evil: evil},
        machine=replace(results.machine, host=evil, processor=evil, gpu=evil),
        same_as_one_process=OneProcess("no, as expected", max_difference=0.3, reason=as_said(evil)),
        proof=Proof(steps=8, dtype="float64", float64_failed=evil),
        engines=[replace(row, engine=evil, reason=as_said(evil), notes=(as_said(evil),)) for row in results.engines],
    )
    html = report.html(results)
    page = Page(html)
    assert page.count("script") == 0 and "<script" not in html
    assert page.text.count("alert('1')") >= 40
    assert page.count("svg") == 3


def test_it_needs_no_other_file_and_no_network(results: CompareResults) -> None:
    html = report.html(results)
    page = Page(html)
    linked = [value for _, of in page.tags for key, value in of.items() if key.split(":")[-1] in ("src", "href")]
    assert linked.count("results.json") == 1
    assert all(value == "results.json" or (value or "").startswith("#") for value in linked)
    assert not {"script", "link", "iframe", "img", "image", "object"} & {tag for tag, _ in page.tags}
    assert "@import" not in html and "url(http" not in html
    outside = html.replace("http://www.w3.org/2000/svg", "").replace("http://www.w3.org/1999/xlink", "")
    assert "http:" not in outside and "https:" not in outside


def test_a_proof_alone_has_no_figures(proof: CompareResults) -> None:
    page = Page(report.html(proof))
    assert page.count("svg") == 0
    assert "samples/s" not in page.text and "launches" not in page.text


def test_values_that_are_missing(results: CompareResults) -> None:
    results = with_row(results, 1, max_difference=None, bound=None, **unmeasured())
    results = with_divergence(results, step=None, rank=None, cause=None)
    results = replace(results, same_as_one_process=None)
    text = Page(report.html(results)).text
    assert "None" not in text and "Usual cause" not in text
    results = replace(results, engines=results.engines[-3:])
    assert Page(report.html(results)).count("svg") == 1  # no engine was measured: the speed figure has the reasons


def test_an_engine_is_named_with_its_changed_settings(results: CompareResults) -> None:
    html = report.html(with_row(results, 3, settings={"reshard": False}))
    assert "<b>fsdp reshard=False</b>" in html and "<b>ddp</b>" in html


def test_what_the_terminal_says_is_in_the_report_is_there(proof: CompareResults) -> None:
    inexact = with_row(
        proof, 1, numerics=Inexactness(distance=0.125, bound=None, loss_gap=0.5, skipped_steps=0), notes=()
    )
    assert inexact.engines[1].numerics
    said = str(verdicts.numerics(inexact.engines[1].numerics))
    assert str(message("notes_in_the_report", engines=["ddp", "fsdp"])) in "\n".join(report.footer(inexact))
    assert report.html(inexact).count(said) == 1 and said not in report.html(proof)


def test_a_gpu_is_named_where_there_is_one(results: CompareResults) -> None:
    assert "GPU" not in Page(report.html(results)).text
    results = replace(results, machine=replace(results.machine, gpu="NVIDIA H200"))
    assert "GPU NVIDIA H200" in Page(report.html(results)).text


SCRIPT = """
import json, sys
from samestep import report
from samestep.records.files import from_json
from samestep.records.results import CompareResults
early = {"torch", "matplotlib", "jinja2", "rich"} & set(sys.modules)
assert not early, early
results = from_json(CompareResults, json.load(sys.stdin))
report.table(results), report.notes(results)
late = {"torch", "matplotlib", "jinja2"} & set(sys.modules)
assert not late, late
sys.stdout.write(report.html(results))
assert "torch" not in sys.modules and "matplotlib.pyplot" not in sys.modules
"""


@pytest.mark.parametrize("seed", ["1", "2"])
def test_another_process_writes_the_same_page_without_torch(results: CompareResults, seed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(results_json(results)),
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=budget(),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == report.html(results)
    assert done.stderr == ""
