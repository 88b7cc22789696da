"""The figures: no bar for what was not proven, every step drawn, the same bytes each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from xml.etree import ElementTree

import matplotlib
import pytest
from example_results import with_row, with_speed, with_step_ms

from samestep.records.results import CompareResults
from samestep.report import plots, verdicts

SVG = "{http://www.w3.org/2000/svg}"
FIGURES = [plots.speed, plots.steps, plots.losses]
Figure = Callable[[CompareResults], str]


def texts(svg: str) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def bars(svg: str) -> set[str]:
    names = (element.get("id", "") for element in ElementTree.fromstring(svg).iter(f"{SVG}g"))
    return {name for name in names if name.startswith("speed-bar-")}


def test_only_proven_engines_have_a_bar(results: CompareResults) -> None:
    svg = plots.speed(results)
    assert bars(svg) == {f"speed-bar-{number}" for number in range(5)}  # single, ddp, ddp, fsdp, amp
    for row in results.engines[5:]:
        assert any(text.startswith(verdicts.verdict_text(row)) for text in texts(svg))
    assert not any("7,111" in text for text in texts(svg))


def test_a_bar_carries_its_interval_and_n(results: CompareResults) -> None:
    shown = texts(plots.speed(results))
    assert "5,203 (5,047–5,307, n=5)" in shown
    (inexact,) = [text for text in shown if text.startswith("5,872 (5,695–5,989, n=5)")]
    assert inexact.endswith(verdicts.verdict_text(results.engines[4]))


def test_a_bar_is_as_long_as_its_median(results: CompareResults) -> None:
    """Lengths from the drawing itself: 'M x0 y0 L x1 y1 …' is a rectangle's path."""
    results = with_speed(results, 1, high=1.1 * verdicts.speed(results.engines[1]).high)
    lengths = {}
    for group in ElementTree.fromstring(plots.speed(results)).iter(f"{SVG}g"):
        if group.get("id", "").startswith("speed-bar-"):
            path = group.find(f"{SVG}path")
            assert path is not None
            across = [
                float(word) for word in path.get("d", "").replace("L", "M").split("M")[1:3] for word in word.split()[:1]
            ]
            lengths[group.get("id")] = across[1] - across[0]
    medians = [verdicts.speed(row).median for row in results.engines[:5]]
    for number, median in enumerate(medians):
        assert lengths[f"speed-bar-{number}"] / lengths["speed-bar-0"] == pytest.approx(median / medians[0], rel=1e-4)


def test_every_measured_step_of_every_launch_is_a_dot(results: CompareResults) -> None:
    dots = len(list(ElementTree.fromstring(plots.steps(results)).iter(f"{SVG}use")))
    results = with_step_ms(results, 1, [])
    without = len(list(ElementTree.fromstring(plots.steps(results)).iter(f"{SVG}use")))
    assert dots - without == 60
    assert dots >= 5 * 5 * 60  # five proven engines, five launches each; the rest are ticks


def test_the_steps_of_unproven_engines_are_not_shown(results: CompareResults) -> None:
    assert "ddp (torchrun)" in texts(plots.steps(results))
    assert "lightning (torchrun)" not in texts(plots.steps(results))
    assert "median 12.3 ms" in texts(plots.steps(results))


@pytest.mark.parametrize("slowest", [13.0, 400.0])
def test_the_axis_of_steps_has_numbers_at_any_span(results: CompareResults, slowest: float) -> None:
    results = replace(results, engines=results.engines[1:2])
    results = with_step_ms(results, 0, [slowest, *results.engines[0].launches[0].step_ms[1:]])
    assert len([text for text in texts(plots.steps(results)) if text.replace(".", "").isdigit()]) >= 4


def test_all_losses_are_drawn_and_named(results: CompareResults) -> None:
    shown = texts(plots.losses(results))
    assert [text for text in shown if text.endswith(("torchrun)", "spawn)", "process)"))] == [
        "single (process)",
        "ddp (torchrun)",
        "ddp (spawn)",
        "fsdp (torchrun)",
        "amp (torchrun)",
        "lightning (torchrun)",
    ]
    assert plots.losses(results).count(plots.VERMILION.lower()) == 5 + 1  # five launches that differ, one legend


def test_what_differs_is_drawn_last(results: CompareResults) -> None:
    results = replace(results, engines=results.engines[::-1])
    assert [text for text in texts(plots.losses(results)) if "(torchrun)" in text][-1] == "lightning (torchrun)"


@pytest.mark.filterwarnings("error:Glyph")
@pytest.mark.parametrize("figure", FIGURES)
def test_text_is_text_whatever_it_holds(results: CompareResults, figure: Figure) -> None:
    name = '<b>&"$x^{2}$ $\\frac$ \x1b[31m文'
    svg = figure(with_row(results, 1, engine=name))
    assert any('<b>&"$x^{2}$ $\\frac$ \\x1b[31m文 (torchrun)' in text for text in texts(svg))
    assert "<b>" not in svg


@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure_says_what_it_is_and_fits_any_width(results: CompareResults, figure: Figure) -> None:
    root = ElementTree.fromstring(figure(results))
    assert root.tag == f"{SVG}svg" and root.get("role") == "img" and root.get("aria-label")
    assert root.get("viewBox") and root.get("width") is None
    assert "1980" not in figure(results) and "<metadata" not in figure(results)


def test_references_stay_inside_and_ids_are_unique_over_all_figures(results: CompareResults) -> None:
    ids: list[str] = []
    for figure in FIGURES:
        root = ElementTree.fromstring(figure(results))
        own = [element.get("id", "") for element in root.iter() if element.get("id")]
        for element in root.iter():
            for key, value in element.attrib.items():
                if key.endswith("href"):
                    assert value[1:] in own
                elif "url(#" in value:
                    assert value.split("url(#")[1].split(")")[0] in own
        ids += own
    assert len(set(ids)) == len(ids) > 100


@pytest.mark.parametrize("figure", FIGURES)
def test_the_same_results_give_the_same_bytes(results: CompareResults, figure: Figure) -> None:
    assert figure(results) == figure(results)


def test_the_callers_matplotlib_settings_are_left_alone(results: CompareResults) -> None:
    with matplotlib.rc_context({"font.size": 3.0}):
        plots.speed(results)
        assert matplotlib.rcParams["font.size"] == 3.0


def test_values_that_were_not_measured(results: CompareResults) -> None:
    results = with_row(results, 1, ratio=None, step_ms=None)
    results = with_speed(results, 1, n=1, low=5203.0, high=5203.0)
    assert "5,203 (n=1)" in texts(plots.speed(results))
    assert "median 12.3 ms" not in texts(plots.steps(results))
    assert bars(plots.speed(replace(results, engines=results.engines[-3:]))) == set()
