"""The timeline as a reader meets it, in headless Chromium.

Playwright drives its own browser (``playwright install chromium``), or the one that ZEROLAP_CHROMIUM names.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.browser import LOWEST_CONTRAST, Open, opening
from support.synthetic_runs import run_of, trace_of
from zerolap.observe.timeline import RankTrace, Span, judge, merge, to_html

playwright = pytest.importorskip("playwright.sync_api", reason="needs the playwright package")

pytestmark = pytest.mark.browser

MOST_MS = 2000  # until the picture of the largest run is there

# How many pixels of the picture are of about this colour.
COUNT = """(canvas, [r, g, b]) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let i = 0; i < data.length; i += 4) {
    if (Math.abs(data[i] - r) + Math.abs(data[i + 1] - g) + Math.abs(data[i + 2] - b) < 24) count++;
  }
  return count;
}"""
RED = {"light": [217, 38, 28], "dark": [255, 90, 79]}


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens a run's page."""
    with opening(browser, tmp_path / "page.html", lambda traces: to_html(merge(traces))) as open_page:
        yield open_page


def window(page: Any) -> tuple[float, float]:
    """The time that is shown, in microseconds."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    chart = page.locator(".chart canvas")
    return float(chart.get_attribute("data-from")), float(chart.get_attribute("data-to"))


def chart_box(page: Any) -> dict[str, float]:
    box: dict[str, float] = page.locator(".chart canvas").bounding_box()
    return box


def word_run() -> list[RankTrace]:
    """Long unbroken words wherever a name comes from the user."""
    word = "w" * 300
    spans = [Span("step", 0, 0, 0, 1), Span("gather", 0, 0, 1, 1), Span("use", 0, 0.5, 1, 1, word)]
    (trace,) = [trace_of(spans)]
    trace.about.update(adapter=word, device=word)
    return [trace]


@pytest.mark.parametrize("width", [1280, 768, 400, 320])
@pytest.mark.parametrize(
    "traces", [run_of(2, 8, 3), run_of(20, 8, 2), word_run(), [trace_of([])]], ids=["few", "many", "wide", "empty"]
)
def test_page_never_scrolls_sideways(open_page: Open, traces: list[RankTrace], width: int) -> None:
    page = open_page(traces, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    right = "Math.max(...[...document.querySelectorAll('.page *')].map((e) => e.getBoundingClientRect().right))"
    assert page.evaluate(right) <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_what_is_exposed_is_red_in_both_themes(open_page: Open, scheme: str, width: int) -> None:
    page = open_page(run_of(2, 8, 3), width=width, color_scheme=scheme)
    chart = page.locator(".chart canvas")
    assert chart.evaluate(COUNT, RED[scheme]) > 100
    hidden = open_page([trace_of([Span("gather", 0, 0, 1, 1), Span("step", 0, 0, 0, 1)])], color_scheme=scheme)
    assert hidden.locator(".chart canvas").evaluate(COUNT, RED[scheme]) == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_keeps_a_contrast_of_four_and_a_half(open_page: Open, scheme: str) -> None:
    contrast, where = open_page(run_of(2, 8, 3), color_scheme=scheme).evaluate(LOWEST_CONTRAST)
    assert contrast >= 4.5, where


def test_the_verdict_stands_on_top(open_page: Open) -> None:
    traces = run_of(2, 8, 3)
    page, verdict = open_page(traces), judge(merge(traces).traces)
    playwright.expect(page.get_by_role("heading", level=1)).to_have_text(str(verdict).split(";")[0])
    assert page.title().startswith(str(verdict).split(";")[0])


def test_the_wheel_zooms_where_the_pointer_is_and_dragging_moves(open_page: Open) -> None:
    page = open_page(run_of(2, 8, 3))
    box, (first, last) = chart_box(page), window(page)
    assert first == 0
    x, y = box["x"] + 0.7 * box["width"], box["y"] + 60
    page.mouse.move(x, y)
    gutter = 136
    under = first + (x - box["x"] - gutter) / (box["width"] - gutter) * (last - first)
    for _ in range(5):
        page.mouse.wheel(0, -200)
    start, end = window(page)
    assert end - start < 0.3 * last
    now_under = start + (x - box["x"] - gutter) / (box["width"] - gutter) * (end - start)
    assert abs(now_under - under) < 0.01 * last, "the place under the pointer stays"
    page.mouse.down()
    page.mouse.move(x + 200, y, steps=4)
    page.mouse.up()
    moved, moved_end = window(page)
    assert moved == pytest.approx(start - 200 / (box["width"] - gutter) * (end - start), abs=0.01 * last)
    assert moved_end - moved == pytest.approx(end - start, abs=2)
    for _ in range(20):
        page.mouse.wheel(0, 400)
    assert window(page) == (0, last), "no further out than all of it"


def test_keys_and_buttons_do_the_same(open_page: Open) -> None:
    page = open_page(run_of(2, 8, 3))
    whole = window(page)
    page.locator(".chart canvas").focus()
    page.keyboard.press("+")
    zoomed = window(page)
    assert zoomed[1] - zoomed[0] == pytest.approx(whole[1] / 2, abs=2)
    page.keyboard.press("ArrowRight")
    assert window(page)[0] > zoomed[0]
    page.keyboard.press("ArrowLeft")
    assert window(page)[0] == pytest.approx(zoomed[0], abs=2)
    page.get_by_role("button", name="Zoom out").click()
    assert window(page) == whole
    page.get_by_role("button", name="Zoom in").click()
    assert window(page) == pytest.approx(zoomed, abs=2)
    page.get_by_role("button", name="All").click()
    assert window(page) == whole


def test_the_strip_above_chooses_a_time(open_page: Open) -> None:
    page = open_page(run_of(2, 8, 3))
    _, last = window(page)
    box = page.locator(".overview").bounding_box()
    width = box["width"] - 136
    page.mouse.move(box["x"] + 136 + 0.25 * width, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 136 + 0.5 * width, box["y"] + 20, steps=4)
    page.mouse.up()
    assert window(page) == pytest.approx((0.25 * last, 0.5 * last), abs=0.01 * last)


def test_pointing_tells_what_it_is_and_leaving_forgets_it(open_page: Open) -> None:
    page = open_page(run_of(2, 8, 3))
    tip, box, seen = page.locator(".tip"), chart_box(page), set()
    for y in range(40, int(box["height"]), 7):
        for x in range(150, int(box["width"]), 40):
            page.mouse.move(box["x"] + x, box["y"] + y)
            if tip.is_visible():
                seen.add(tip.locator("strong").inner_text().split(":")[0].rstrip("0123456789"))
                assert "rank " in tip.inner_text()
                inside = page.evaluate(
                    "(() => { const t = document.querySelector('.tip').getBoundingClientRect(), c = document.querySelector('.chart').getBoundingClientRect(); return t.left >= c.left && t.right <= c.right; })()"
                )
                assert inside
    assert {"Forward", "Backward", "Reduce of bucket ", "Gather of bucket ", "Update of bucket "} <= seen, seen
    assert any(text.startswith("Training waits") for text in seen), seen
    page.mouse.move(2, 2)
    playwright.expect(tip).to_be_hidden()


def test_next_wait_goes_from_one_to_the_next_and_tells_it(open_page: Open) -> None:
    page = open_page(run_of(2, 8, 3))
    told = page.locator(".told")
    page.get_by_role("button", name="Wait ▶").click()
    first = told.inner_text()
    assert first.startswith("Training waits")
    assert "backward's end waits for it" in first
    page.locator(".chart canvas").focus()
    page.keyboard.press("n")
    assert told.inner_text() != first
    page.keyboard.press("p")
    assert told.inner_text() == first


def test_a_line_of_the_table_leads_to_its_longest_wait(open_page: Open) -> None:
    page = open_page(run_of(2, 8, 3))
    whole = window(page)
    page.locator("tbody tr").first.focus()
    page.keyboard.press("Enter")
    start, end = window(page)
    assert end - start < 0.2 * whole[1]
    bucket = page.locator("tbody tr th").first.inner_text().split("'")[0].split()[-1]
    assert f"reduce of bucket {bucket}" in page.locator(".told").inner_text()


def test_a_rank_opens_and_closes(open_page: Open) -> None:
    page = open_page(run_of(20, 8, 2))
    box = chart_box(page)
    closed = page.locator(".chart canvas").evaluate("(c) => c.toDataURL()")
    page.mouse.click(box["x"] + 20, box["y"] + 45)
    window(page)
    assert page.locator(".chart canvas").evaluate("(c) => c.toDataURL()") != closed


def test_a_finger_pans_and_the_details_stand_below_on_a_phone(open_page: Open) -> None:
    page = open_page(run_of(2, 8, 3), width=400, has_touch=True, is_mobile=True)
    box = chart_box(page)
    page.touchscreen.tap(box["x"] + 0.3 * box["width"], box["y"] + 50)
    assert "rank 0" in page.locator(".told").inner_text()
    playwright.expect(page.locator(".tip")).to_be_hidden()


def test_without_a_script_the_verdict_and_the_table_read(open_page: Open) -> None:
    page = open_page(run_of(2, 8, 3), java_script_enabled=False)
    playwright.expect(page.get_by_role("heading", level=1)).to_be_visible()
    playwright.expect(page.get_by_role("cell", name="Backward's end waits for it").first).to_be_visible()
    assert page.locator("button:visible").count() == 0


def test_64_ranks_of_200_buckets_are_there_in_two_seconds_and_move_smoothly(open_page: Open) -> None:
    page = open_page(run_of(64, 200, 3))
    painted = float(page.evaluate("document.documentElement.dataset.painted"))
    print(f"first paint after {painted:.0f} ms")
    assert painted < MOST_MS
    box = chart_box(page)
    page.mouse.move(box["x"] + 700, box["y"] + 200)
    frame = """async () => {
      const canvas = document.querySelector(".chart canvas"), times = [];
      for (let i = 0; i < 12; i++) {
        const begin = performance.now();
        canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: i % 2 ? 120 : -120, bubbles: true, cancelable: true }));
        await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
        times.push(performance.now() - begin);
      }
      return times.sort((a, b) => a - b)[6];
    }"""
    median = page.evaluate(frame)
    print(f"a frame takes {median:.0f} ms")
    assert median < 250, median
