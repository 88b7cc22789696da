"""The page: it is complete, escapes what it shows, needs no other file, and has the same bytes every time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from example_results import unmeasured, with_divergence, with_row

from budget import budget
from samestep import report
from samestep.message import as_said
from samestep.records.monitor import GpuSummary, MonitorSummary
from samestep.records.results import CompareResults, Inexactness, OneProcess, Proof, results_json

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


def test_the_headline_comes_first_and_nothing_is_left_out(results: CompareResults) -> None:
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


def test_a_table_row_has_as_many_cells_as_the_heading(results: CompareResults, proof: CompareResults) -> None:
    for shown in (results, proof):
        table = report.html(shown).split("<table>")[1].split("</table>")[0]
        heading, *rows = table.split("<tr>")[1:]
        assert len(rows) == 9
        for row in rows:
            spanned = sum(int(columns) - 1 for columns in re.findall(r'colspan="(\d+)"', row))
            assert row.count("<td") + spanned == heading.count("<th ")


def test_what_a_launch_used_stands_in_a_table(results: CompareResults) -> None:
    gpu = GpuSummary(0.87, 12 << 30, None, 250.0, None, 61.0)
    usage = MonitorSummary(8.0, 9, 1.0, 1.75, 14.0, 3 << 30, 5, 0, 0, 1.9, 4 << 30, 0, 2 << 20, 7 << 20, gpus=(gpu,))
    assert "What a launch used" not in Page(report.html(results)).text
    used = Page(report.html(with_row(results, 1, monitor=usage))).text.split("What a launch used")[1]
    assert "ddp (torchrun) 8 1.75 3 GiB 7 MiB 2 MiB 0: 87 % 12 GiB 250 W 61 °C" in used


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
    assert "rank 1 was killed (signal 9) in step 12" in page.text
    assert "How this was proven" in page.text and "differs at step 3" in page.text


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
    assert "in the report" in "\n".join(report.footer(inexact))
    assert report.html(inexact).count("in float32, its final weights") == 1
    assert "in float32, its final weights" not in report.html(proof)


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
