"""The page of `rmsnorm bench --html`, in a real browser: Debian's chromium, driven by playwright."""

import itertools
import math
import os
import shutil

import pytest

from rmsnorm.benchmarking.timing import Timing
from rmsnorm.cli.bench import page, plot
from rmsnorm.cli.bench.measure import Result
from rmsnorm.cli.bench.shapes import Case, Shape

NAMES = ("copy", "rmsnorm", "F.rms_norm", "vllm")
SHAPES = (Shape(1, 4096, "llama3-8b decode"), Shape(1024, 384, "small-lm train"))
PATIENCE = 180_000  # milliseconds, for a page of megabytes where other tests have the cores
ABOUT = {"processor": "A Processor", "torch": "2.13", "command": "rmsnorm bench --shapes </script><b>"}


def results():
    found = []
    for what in ("forward", "training"):
        for dtype in ("float32", "bfloat16"):
            for shape in SHAPES:
                case = Case(what, shape, dtype, "cpu", 1)
                for i, name in enumerate(NAMES):
                    seconds = (i + 1) * 1e-6 * shape.cols
                    timing = Timing(seconds, 0.9 * seconds, 1.2 * seconds)
                    found.append(Result(case, "warm", name, "timed", None, timing, 10.0 / (i + 1), 1 / (i + 1)))
                found.append(Result(case, "warm", "apex", "missing", "not installed"))
    wrong = Case("forward", SHAPES[0], "float32", "cpu", 1)
    return [*found, Result(wrong, "warm", "liger", "wrong", "y is off <i>far</i>")]


@pytest.fixture(scope="module")
def browser():
    """Chromium; what is missing skips, but fails in CI."""
    chromium = shutil.which("chromium")
    if chromium is None and not os.environ.get("CI"):
        pytest.skip("no chromium here: apt-get install chromium")
    if os.environ.get("CI"):
        from playwright.sync_api import sync_playwright
    else:
        sync_playwright = pytest.importorskip("playwright.sync_api", reason="no playwright here").sync_playwright
    with sync_playwright() as started:
        # Root may not have Chromium's sandbox.
        yield started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])


@pytest.fixture
def opened(browser, tmp_path):
    """The page, and what its console said."""
    file = tmp_path / "bench.html"
    page.write(ABOUT, results(), file)
    tab = browser.new_page(viewport={"width": 1100, "height": 1200})
    said = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: request.url.startswith(("file:", "data:", "blob:")) or said.append(request.url))
    tab.set_default_timeout(PATIENCE)
    tab.goto(file.as_uri())
    tab.wait_for_selector("#plot .main-svg")
    yield tab
    tab.close()
    assert said == []


def button(tab, group, text):
    return tab.get_by_role("group", name=group).get_by_role("button", name=text, exact=True)


def drawn(tab):
    """The names of the lines in the plot."""
    return tab.evaluate("document.getElementById('plot').data.map(trace => trace.name)")


def test_everything_can_be_chosen(opened, tmp_path):
    assert drawn(opened) == list(NAMES)
    assert opened.locator("#title").inner_text() == "forward, float32, 1 thread, warm caches"
    assert opened.locator("#plot .scatterlayer .trace").count() == len(NAMES)

    button(opened, "contestants", "vllm").click()
    assert drawn(opened) == list(NAMES[:-1])
    assert "vllm" not in opened.locator("#table").inner_text()
    button(opened, "contestants", "vllm").click()
    assert drawn(opened) == list(NAMES)

    button(opened, "shapes", "small-lm train 1024x384").click()
    assert opened.locator("#table thead th").all_inner_texts()[1:] == ["1x4096\nllama3-8b decode"]
    assert opened.evaluate("document.getElementById('plot').data[1].x") == ["1x4096"]
    button(opened, "shapes", "small-lm train 1024x384").click()

    button(opened, "dtype", "bfloat16").click()
    button(opened, "operation", "training").click()
    assert opened.locator("#title").inner_text() == "training, bfloat16, 1 thread, warm caches"

    button(opened, "show", "time").click()
    assert opened.evaluate("document.getElementById('plot').data[1].y") == pytest.approx([2 * 4096, 2 * 384])
    assert opened.evaluate("document.getElementById('plot').layout.yaxis.title.text") == "microseconds"

    shot = tmp_path / "shot.png"
    opened.screenshot(path=shot, full_page=True)
    assert shot.stat().st_size > 20_000


def test_the_table_and_the_absent_are_text_as_it_was_given(opened):
    cells = opened.locator("#table tbody tr").nth(1).inner_text()
    assert "8.19 ms" in cells
    assert "7.37 ms to 9.83 ms" in cells
    assert "50 %" in cells
    absent = opened.locator("#absent").inner_text()
    assert absent.splitlines()[0] == "WRONG: liger: y is off <i>far</i> (forward llama3-8b decode 1x4096 float32)"
    assert "apex: not installed (forward, training)" in absent
    assert ABOUT["command"] in opened.locator("#about").inner_text()


WIDE = tuple(Shape(rows, cols) for rows, cols in ((8192, 8192), (32, 4096), (8, 8192), (2048, 4096), (16384, 128)))


@pytest.mark.parametrize("width", [390, 700, 1100])
def test_the_shapes_below_the_plot_do_not_overlap(width, browser, tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.SHAPES", (*SHAPES, *WIDE))
    file = tmp_path / "bench.html"
    page.write(ABOUT, results(), file)
    tab = browser.new_page(viewport={"width": width, "height": 900})
    tab.set_default_timeout(PATIENCE)
    tab.goto(file.as_uri())
    tab.wait_for_selector("#plot .xtick text")
    labels = tab.evaluate(_LABELS)
    tab.close()
    assert len(labels) == 7
    for one, other in itertools.pairwise(labels):
        # Two slanted lines of text are as far apart as their ends are, across.
        apart = (other["x"] - one["x"]) * abs(math.sin(one["angle"]))
        assert apart >= one["height"] or other["x"] - one["x"] >= (one["width"] + other["width"]) / 2
    assert all(label["left"] >= 0 and label["right"] <= width for label in labels)


_LABELS = """[...document.querySelectorAll('#plot .xtick text')].map(text => {
  const {width, height} = text.getBBox(), m = text.getScreenCTM(), {left, right} = text.getBoundingClientRect();
  const x = +text.getAttribute('x') * m.a + +text.getAttribute('y') * m.c + m.e;
  return {width, height, left, right, x, angle: Math.atan2(m.b, m.a)};
}).sort((a, b) => a.x - b.x)"""


def test_it_is_drawn_in_the_dark_too(opened):
    light = opened.evaluate("document.getElementById('plot').layout.font.color")
    opened.emulate_media(color_scheme="dark")
    opened.wait_for_function(f"document.getElementById('plot').layout.font.color != {light!r}")


@pytest.mark.parametrize("name", ["found.svg", "found.png"])
def test_the_picture_has_a_line_for_each_contestant(name, tmp_path):
    path = tmp_path / name
    plot.draw(results(), path)
    start = path.read_bytes()[:5]
    assert start == (b"<?xml" if name.endswith("svg") else b"\x89PNG\r")
    drawn = plot.figure(results())
    panels = [panel for panel in drawn.axes if panel.lines]
    assert [panel.get_title() for panel in panels] == [
        f"{what}, {dtype}, 1 thread, warm" for what in ("forward", "training") for dtype in ("float32", "bfloat16")
    ]
    for panel in panels:
        lines = {line.get_label(): line for line in panel.lines if not line.get_label().startswith("_")}
        # The first panel also holds the legend's lines, which have no points.
        assert set(lines) == {"copy (the roof)", *NAMES[1:]}
        assert [label.get_text() for label in panel.get_xticklabels()] == ["1x4096", "1024x384"]
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["copy (the roof)", *NAMES[1:]]
