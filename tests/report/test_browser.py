"""The page in a real browser: it draws, nothing runs, nothing sticks out. Skipped where there is no Chromium."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from example_results import with_row
from PIL import Image

from budget import budget
from samestep import report
from samestep.message import as_said
from samestep.records.results import CompareResults

pytestmark = pytest.mark.check

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]
# Only in the tests' copy of the page: writes down what sticks out of the window or of its figure.
MEASURE = """<script>
const out = [...document.querySelectorAll("svg text")].filter(text => {
  const inner = text.getBoundingClientRect(), outer = text.closest("svg").getBoundingClientRect();
  return inner.left < outer.left - 1 || inner.right > outer.right + 1 || inner.top < outer.top - 1;
}).map(text => text.textContent);
const body = document.body;
body.dataset.out = out.join("|");
body.dataset.texts = document.querySelectorAll("svg text").length;
body.dataset.overflow = document.documentElement.scrollWidth - window.innerWidth;
</script>"""


@pytest.fixture(scope="session")
def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        if found := shutil.which(name):
            return found
    if os.environ.get("CI"):
        pytest.fail("there is no Chromium here, and on CI the page must be seen in a browser")
    pytest.skip("there is no Chromium here: the page was not seen in a browser")


def browse(chromium: str, folder: Path, html: str, *flags: str, width: int = 1280) -> str:
    """What Chromium prints about the page. It is killed, with its children, when it takes over a minute."""
    page = folder / "page.html"
    page.write_text(html, encoding="utf-8")
    profile = folder / f"profile-{len(list(folder.iterdir()))}"
    command = [
        chromium,
        *FLAGS,
        f"--user-data-dir={profile}",
        f"--window-size={width},3200",
        *flags,
        page.as_uri(),
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=budget(40))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0
    return printed


def test_the_page_is_drawn(results: CompareResults, chromium: str, tmp_path: Path) -> None:
    dom = browse(chromium, tmp_path, report.html(results), "--dump-dom")
    title = re.search("<title>(.+)</title>", report.html(results))
    assert title and title[0] in dom
    assert len(re.findall(r"<svg\b", dom)) == 3
    assert 'id="speed-bar-1"' in dom and 'id="speed-bar-5"' not in dom
    assert f"✗ {report.verdict_text(results.engines[5])}" in dom


def test_a_script_in_a_name_does_not_run(results: CompareResults, chromium: str, tmp_path: Path) -> None:
    evil = "<script>document.title = 'owned'</script>"
    results = with_row(with_row(replace(results, job=evil), 1, engine=evil), 8, reason=as_said(evil))
    dom = browse(chromium, tmp_path, report.html(results), "--dump-dom")
    assert "<title>owned</title>" not in dom and "<script" not in dom
    assert "&lt;script&gt;document.title = 'owned'" in dom


@pytest.mark.parametrize("width", [1280, 500])
def test_nothing_sticks_out(results: CompareResults, chromium: str, tmp_path: Path, width: int) -> None:
    html = report.html(results).replace("</body>", f"{MEASURE}</body>")
    dom = browse(chromium, tmp_path, html, "--dump-dom", width=width)
    seen = dict(re.findall(r'data-(\w+)="([^"]*)"', dom))
    assert int(seen["texts"]) > 40
    assert seen["out"] == ""
    assert int(seen["overflow"]) <= 0


def test_the_screenshot_shows_bars_dots_and_the_odd_line(
    results: CompareResults, chromium: str, tmp_path: Path
) -> None:
    shot = tmp_path / "report.png"
    browse(chromium, tmp_path, report.html(results), f"--screenshot={shot}")
    colours = Image.open(io.BytesIO(shot.read_bytes())).convert("RGB").getcolors(1 << 24)
    assert colours
    counts = {colour: count for count, colour in colours}
    assert counts[(0x00, 0x72, 0xB2)] > 20_000  # the bars
    assert counts[(0xD5, 0x5E, 0x00)] > 500  # the losses of the engine that differs
    assert max(counts, key=lambda colour: counts[colour]) == (255, 255, 255)
