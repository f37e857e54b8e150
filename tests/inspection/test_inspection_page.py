"""The HTML page: one file that loads nothing; in a browser, if there is one."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from test_inspection_perfetto import plan

from simplefsdp.inspection.page import _MOST_POINTS, _thinned, page

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def html() -> str:
    pytest.importorskip("plotly")
    return page([plan("manual"), plan("none")], "layers <4 ranks>")


def report_of(html: str):
    text = re.search(r'<script id="report" type="application/json">(.*?)</script>', html)[1]
    return json.loads(text.replace("<\\/", "</"))


def test_the_page_is_one_file_with_the_whole_report(html):
    assert len(html.encode()) < 6_000_000
    assert "<title>layers &lt;4 ranks&gt;</title>" in html
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=[\"']?(http|//)", html)
    manual, none = report_of(html)["plans"]
    assert [manual["name"], none["name"], manual["lanes"]] == ["manual", "none", ["wire 4 (dp)"]]
    report = plan("manual")
    begin = report.step.graphs[0].timeline.total_us
    assert [graph["begin_us"] for graph in manual["graphs"]] == [0, begin, report.step.step_us - 7]
    assert sum(us for _, us, _ in manual["compute"]) == 30 + 90 + 7
    assert sum(b["exposed_us"] for b in manual["buckets"]) == manual["exposed_us"]
    assert max(nbytes for _, nbytes in manual["memory"]) == manual["peak_bytes"]
    last = manual["buckets"][-1]
    assert (last["graph"], last["what"]) == ("backward", "layers.0.weight")
    assert last["begin_us"] >= begin


def test_a_long_curve_is_thinned_and_keeps_its_peak():
    curve = [(float(us), us * 7919 % 10007) for us in range(10_000)]
    thin = list(_thinned(curve))
    assert len(thin) <= _MOST_POINTS + 1
    assert max(n for _, n in thin) == max(n for _, n in curve)
    assert [us for us, _ in thin] == sorted(us for us, _ in thin)
    assert list(_thinned(curve[:100])) == curve[:100]


def test_many_ops_are_drawn_by_module(monkeypatch):
    pytest.importorskip("plotly")
    monkeypatch.setattr("simplefsdp.inspection.page._MOST_SPANS", 1)
    drawn = report_of(page([plan("manual")], "layers"))["plans"][0]["compute"]
    assert drawn[0] == [64, 10, "layers.0: 1 op"]
    assert sum(us for _, us, _ in drawn) == 30 + 90 + 7
    assert any(label.endswith("ops") for _, _, label in drawn)


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 400)])
def test_in_a_browser(html, tmp_path, scheme, width):
    api = pytest.importorskip("playwright.sync_api")
    path = tmp_path / "report.html"
    path.write_text(html)
    wrong: list[str] = []
    with api.sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        tab.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", lambda r: wrong.append(r.url) if r.url.startswith("http") else None)
        tab.goto(path.as_uri())
        tab.wait_for_selector("body[data-ready]")
        assert tab.evaluate("document.documentElement.dataset.theme") == scheme
        assert not tab.evaluate("document.documentElement.scrollWidth > innerWidth")
        assert tab.locator(".figure .barlayer").count() == 2
        bar = tab.locator(".figure").first.locator(".barlayer .point path").last
        box = bar.bounding_box()
        tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        tab.wait_for_selector("tr.hovered")
        assert "needed at" in tab.locator(".hoverlayer").first.text_content()
        tab.locator("tr.bucket").nth(1).click()
        assert tab.locator("tr.selected").count() == 1
        assert tab.evaluate("document.querySelector('.figure').layout.shapes.length") == 4
        tab.evaluate("Plotly.relayout(document.querySelector('.figure'), {'xaxis.range[0]': 0.01,"
                     " 'xaxis.range[1]': 0.02})")  # fmt: skip
        tab.wait_for_function("document.querySelectorAll('.figure')[1].layout.xaxis.range[1] < 0.1")
        if folder := os.environ.get("SIMPLEFSDP_SCREENSHOTS"):
            tab.screenshot(path=str(Path(folder) / f"inspect-{scheme}-{width}.png"))
        browser.close()
    assert wrong == []
