"""The page of a sweep: one file that loads nothing; in a browser, if there is one."""

from __future__ import annotations

import fnmatch
import itertools
import json
import os
import re
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simplefsdp import inspection
from simplefsdp.inspection.page import _ASSETS, _OF_A_SWEEP, filled, sweep_page
from simplefsdp.inspection.sweep_document import sweep_document

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
ROOT = Path(__file__).parents[2]
FULL = {"batch": (1, 2, 4), "seq": (1024, 2048, 4096, 8192), "ranks": (8, 64)}
ROOM = 72_000_000_000


def document(
    axes: dict[str, tuple[int, ...]] = FULL, name: str = "8b", flops: bool = True
) -> dict[str, Any]:
    """What is told of made-up steps: of twice the tokens in twice the time and memory."""
    sweep: Any = SimpleNamespace(
        model=SimpleNamespace(name=name, flops_per_token=(lambda seq: 5e10) if flops else None),
        cluster=SimpleNamespace(name="h100", peak=lambda dtype: SimpleNamespace(tflops=989.0)),
        parallel=SimpleNamespace(tp=1, mixed_precision="bf16"),
        bucketing="auto",
        traced={"one": None},
    )
    steps: Any = [made_up(*sizes) for sizes in itertools.product(*axes.values())]
    return sweep_document(sweep, axes, steps, {"mode": "fully_shard", "layers": None})


class Cell(SimpleNamespace):
    def _asdict(self) -> dict[str, int]:
        return dict(vars(self))


def made_up(batch: int, seq: int, ranks: int) -> SimpleNamespace:
    compute, wire = 90.0 * batch * seq, 60_000.0 + ranks * 1e3
    peak = 6_000_000 * batch * seq
    return SimpleNamespace(
        cell=Cell(batch=batch, seq=seq, ranks=ranks),
        step_us=max(compute, wire) + 10_000 + ranks,
        exposed_us=max(wire - compute, 0.0) + 10_000,
        compute_us=compute,
        wire_us=wire,
        peak_nbytes=peak,
        room_nbytes=ROOM,
        fits=peak <= ROOM,
        binds="memory" if peak > ROOM else "wire" if wire > compute else "compute",
    )


@pytest.fixture(scope="module", autouse=True)
def plotly() -> str:
    """What the page embeds of others."""
    return pytest.importorskip("plotly.offline").get_plotlyjs()


def report_of(html: str) -> Any:
    text = re.search(r'<script id="report" type="application/json">(.*?)</script>', html)
    assert text
    return json.loads(text[1])


def ours(html: str, plotly: str) -> str:
    assert html.count(plotly) == 1
    return html.replace(plotly, "")


def test_the_page_has_all_of_the_document():
    given = document()
    html = sweep_page(given)
    assert report_of(html) == given
    assert "<title>8b on h100: what fits, and how fast</title>" in html
    fit = [cell["fits"] for cell in given["cells"]]
    assert any(fit) and not all(fit) and any(cell["pareto"] for cell in given["cells"])


def test_the_page_loads_nothing(plotly):
    own = ours(sweep_page(document()), plotly)
    assert not re.search(r"https?:|url\(|@import|\bfetch\(|//[a-z]+\.[a-z]", own)
    assert set(re.findall(r"<[^>]*\s(?:src|href)=\"?([^\s\">]*)", own)) == {"data:,"}


@pytest.mark.parametrize(
    "name", ["</script><script>alert(1)</script>", "<!--<script>", "a & b <b>'\"", "$title \\u003c"]
)
def test_a_name_is_text_wherever_it_is(name, plotly):
    given = document(name=name)
    html = sweep_page(given)
    assert report_of(html) == given
    plain = ours(sweep_page(document(name="plain")), plotly)
    for tag in ("<script", "</script", "<!--", "<b>"):
        assert ours(html, plotly).count(tag) == plain.count(tag)


@pytest.mark.parametrize(
    "axes",
    [
        {"batch": (4,), "seq": (8192,), "ranks": (8, 16, 32)},
        {"batch": (1, 2), "seq": (8192,), "ranks": (8,)},
        {"batch": (1,), "seq": (512, 1024), "ranks": (8,)},
        {"batch": (1,), "seq": (512,), "ranks": (1,)},
    ],
)
def test_axes_of_one_value(axes):
    given = document(axes, flops=False)
    found = report_of(sweep_page(given))
    assert found["axes"] == {name: list(values) for name, values in axes.items()}
    assert len(found["cells"]) == len(given["cells"])
    assert all(cell["mfu"] is None for cell in found["cells"])


def test_every_file_of_the_page_is_in_it_and_in_the_package():
    html = sweep_page(document())
    files = {path.name for path in _ASSETS.iterdir() if path.name.startswith("sweep")}
    assert files == set(_OF_A_SWEEP)
    assert all((_ASSETS / name).read_text() in html for name in files)
    package = inspection.__name__  # its path, where it is installed, is not below ROOT
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]
    for name in files:
        its = f"{_ASSETS.name}/{name}"
        assert any(fnmatch.fnmatch(its, glob) for glob in globs[package]), name


def test_scripts_read_only_what_is_there(plotly):
    """What a browser would tell as an error or as undefined, without one."""
    own = ours(sweep_page(document()), plotly)
    ids = set(re.findall(r'<[a-z0-9]+[^<>]*\bid="([a-z]+)"', own))
    assert set(re.findall(r'getElementById\("([a-z]+)"\)', own)) <= ids
    script = "".join((_ASSETS / name).read_text() for name in _OF_A_SWEEP if name.endswith(".js"))
    read = set(re.findall(r"\bcell\.([a-z_]+)", script)) - {"length"}
    assert {"peak_bytes", "reason", "pareto"} <= read <= set(document()["cells"][0])
    assert set(re.findall(r"\bsweep\.([a-z_]+)", script)) <= set(document())
    declared = set(re.findall(r"--([a-z0-9-]+):", own))
    assert set(re.findall(r'color\("([a-z-]+)"\)', script)) <= declared


def test_the_scripts_of_other_pages_are_not_in_it(plotly):
    own = ours(sweep_page(document()), plotly)
    assert "stepsTable" not in own
    assert own.count('"use strict"') == 1
    assert len(ours(filled([], "", "", {}), plotly)) < len(own)


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    with api.sync_playwright() as browsers:
        opened = browsers.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def tab_of(browser, tmp_path):
    """Opens a page; at the end nothing may have gone wrong in it."""
    wrong: list[str] = []

    def opened(given: dict[str, Any], width: int, scheme: str = "light"):
        path = tmp_path / "sweep.html"
        path.write_text(sweep_page(given))
        tab = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme=scheme, has_touch=width < 700
        )
        tab.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", lambda r: wrong.append(r.url) if r.url.startswith("http") else None)
        tab.goto(path.as_uri())
        tab.wait_for_selector("body[data-ready]")
        assert not tab.evaluate("document.documentElement.scrollWidth > innerWidth")
        return tab

    yield opened
    assert wrong == []


def middle(tab, i: int, j: int) -> tuple[float, float]:
    """Where on the screen a cell is."""
    left, top, right, bottom = tab.evaluate(
        f"(({{left, top, right, bottom}}) => [left, top, right, bottom])(boxOf([{i}, {j}]))"
    )
    tab.locator("#map").scroll_into_view_if_needed()
    frame = tab.locator("#map").bounding_box()
    return frame["x"] + (left + right) / 2, frame["y"] + (top + bottom) / 2


def test_pointed_at_in_a_browser(tab_of):
    tab = tab_of(document(), 1280)
    tip = tab.locator("#tip")
    assert not tip.is_visible()
    assert tab.locator("#shown").text_content() == "tokens/s per rank, at 8 ranks"
    assert tab.locator("#map .textpoint").count() == 12
    tab.mouse.move(*middle(tab, 0, 0))
    tip.wait_for()
    said = tip.text_content()
    assert said.startswith("batch 1, 1k tokens, 8 ranks")
    assert "compute hides all of the wire" in said and "6.14 GB of 72.0 GB" in said
    tab.mouse.move(*middle(tab, 3, 2))
    tab.wait_for_function("document.getElementById('tip').textContent.includes('does not fit')")
    tab.get_by_role("button", name="memory").click()
    tab.wait_for_function("document.querySelector('#map .textpoint').textContent === '8.5%'")
    assert "273%" in tab.locator("#map").text_content()
    tab.get_by_role("button", name="64", exact=True).click()
    tab.wait_for_function("document.getElementById('shown').textContent.includes('64 ranks')")
    tab.get_by_role("button", name="ranks, batch").click()
    tab.wait_for_function("document.getElementById('shown').textContent.includes('1k tokens')")
    front = tab.evaluate("sweep.cells.filter((cell) => cell.pareto && cell.seq === 1024).length")
    assert front == tab.locator("#map .shapelayer path").count() > 0
    told = [tab.evaluate(said) for said in ("digits(999.7)", "short(999700)", "short(1234, 2)")]
    assert told == ["1000", "1.00M", "1.2k"]


def test_tapped_in_a_browser(tab_of):
    tab = tab_of(document(), 400, "dark")
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    # The longer axis goes down.
    assert tab.evaluate("[map.x, map.y, map.nx, map.ny]") == ["batch", "seq", 3, 4]
    tab.touchscreen.tap(*middle(tab, 0, 0))
    tab.locator("#tip").wait_for()
    assert "1k tokens" in tab.locator("#tip").text_content()
    assert tab.locator("#chosen").is_visible()
    box = tab.locator("#tip").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 400
    before = tab.evaluate("map.stops.join()")
    tab.locator("#theme").click()
    tab.wait_for_function(f"map.stops.join() !== '{before}'")
    if folder := os.environ.get("SIMPLEFSDP_SCREENSHOTS"):
        tab.screenshot(path=str(Path(folder) / "sweep-400.png"))


def test_by_keyboard_in_a_browser(tab_of):
    tab = tab_of(document(), 1280)
    tip = tab.locator("#tip")
    tab.locator("#map").focus()
    for key in ("ArrowUp", "ArrowUp", "ArrowRight", "ArrowLeft", "ArrowLeft"):
        tab.keyboard.press(key)
    assert tip.text_content().startswith("batch 2, 1k tokens, 8 ranks")
    tab.keyboard.press("Escape")
    assert not tip.is_visible()
    last = tab.locator("#front tr[tabindex]").last
    assert "8k" in last.text_content() and "64" in last.text_content()
    last.focus()
    tab.wait_for_function("document.getElementById('shown').textContent.includes('64 ranks')")
    assert "8k tokens, 64 ranks" in tip.text_content()
    assert tab.locator("#front tr.selected").count() == 1


def test_only_what_there_is_to_choose_in_a_browser(tab_of):
    one = {"batch": (4,), "seq": (8192,), "ranks": (8, 16, 32)}
    tab = tab_of(document(one, "</script><!--<script>", flops=False), 1280)
    assert tab.locator("h1").text_content().startswith("</script><!--<script> on h100")
    assert tab.evaluate("[map.x, map.nx, map.ny]") == ["ranks", 3, 1]
    assert tab.locator("#choices .choice").count() == 1
    assert tab.get_by_role("button", name="MFU").count() == 0


def test_many_cells_in_a_browser(tab_of):
    many = {
        "batch": (1, 2), "seq": tuple(range(128, 12928, 128)), "ranks": tuple(range(8, 112, 8))
    }  # fmt: skip
    tab = tab_of(document(many), 1280)
    assert tab.evaluate("[map.nx, map.ny]") == [100, 2]
    assert tab.locator("#map .textpoint").count() == 0
    slider = tab.locator("#choices input[type=range]")
    slider.focus()
    tab.keyboard.press("Home")
    tab.wait_for_function("document.getElementById('shown').textContent.includes('at 8 ranks')")
    assert tab.locator("#map .hm image").count() == 1  # an image, however many cells
