"""The page of a verdict as a reader meets it, in headless Chromium.

Playwright drives its own browser (``playwright install chromium``), or the one that ZEROLAP_CHROMIUM names.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.browser import LOWEST_CONTRAST, Open, opening
from support.verdicts import failing, passing
from zerolap_conformance.page import to_html

playwright = pytest.importorskip("playwright.sync_api", reason="needs the playwright package")

pytestmark = pytest.mark.browser


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens a verdict's page."""
    with opening(browser, tmp_path / "page.html", to_html) as open_page:
        yield open_page


def wide_verdict() -> dict[str, Any]:
    """A verdict with a long unbroken word in every place that could push the page wide."""
    word = "w" * 300
    verdict = failing(is_simulated=True)
    verdict["adapter"].update(name=f"acme-{word}", capabilities={word: word})
    verdict["environment"].update(platform=word, devices=[word], advice=[word])
    verdict["tiers"] = {**verdict["tiers"], "2": word}
    for each in verdict["requirements"]:
        each.update(sentence=word, notes=[word], reason=word, capability=word)
    verdict["requirements"][-1]["id"] = f"OVL-{word}"
    return verdict


def shown(page: Any) -> list[str]:
    """The ids of the requirements that can be seen."""
    return [each.get_attribute("id") for each in page.locator(".requirement:visible").all()]


@pytest.mark.parametrize("width", [1280, 768, 400, 320])
@pytest.mark.parametrize(
    "verdict", [passing(), failing(is_simulated=True), wide_verdict()], ids=["pass", "fail", "wide"]
)
def test_page_never_scrolls_sideways(open_page: Open, verdict: dict[str, Any], width: int) -> None:
    page = open_page(verdict, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    # Nothing is cut off either: only the blocks that scroll inside themselves may be wider than their place.
    right = "Math.max(...[...document.querySelectorAll('.page *')].map((e) => e.getBoundingClientRect().right))"
    assert page.evaluate(right) <= width


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("has_script", [True, False], ids=["script", "no script"])
def test_first_failure_is_one_click_from_the_top_and_the_next_one_too(
    open_page: Open, width: int, has_script: bool
) -> None:
    page = open_page(failing(), width=width, java_script_enabled=has_script)
    page.get_by_role("link", name="2 failed").click()
    playwright.expect(page.get_by_text("COL-4 on rank 1")).to_be_in_viewport()
    page.locator("header").get_by_role("link", name="OVL-2").click()
    playwright.expect(page.get_by_text("OVL-2 on rank 1")).to_be_in_viewport()


def test_filters_show_what_they_say_and_hide_empty_tiers(open_page: Open) -> None:
    page = open_page(failing())
    headings = page.locator(".tier h3:visible")
    assert len(shown(page)) == 29
    for name, expected, tiers in (
        ("Failed 2", ["COL-4", "OVL-2"], 2),
        ("Skipped 2", ["COL-2", "COL-5"], 1),
        ("Notes 2", ["ADP-4", "OVL-6"], 2),
    ):
        page.get_by_role("button", name=name).click()
        assert shown(page) == expected
        assert headings.count() == tiers
        playwright.expect(page.get_by_role("button", pressed=True)).to_have_text(name)
        playwright.expect(page.get_by_role("status")).to_have_text("2 of 29 shown")
    page.get_by_role("button", name="All 29").click()
    assert len(shown(page)) == 29


def test_filters_work_from_the_keyboard(open_page: Open) -> None:
    page = open_page(failing())
    page.get_by_role("button", name="All 29").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert shown(page) == ["COL-4", "OVL-2"]


def test_link_to_a_failure_undoes_the_filter_that_hides_it_and_opens_its_details(open_page: Open) -> None:
    page = open_page(failing())
    details = page.get_by_text("COL-4 on rank 1")
    page.get_by_role("link", name="2 failed").click()
    page.locator("#COL-4 summary").click()
    playwright.expect(details).to_be_hidden()
    page.get_by_role("button", name="Skipped 2").click()
    page.get_by_role("link", name="2 failed").click()
    playwright.expect(details).to_be_in_viewport()


def test_without_a_script_everything_reads_and_no_dead_button_is_shown(open_page: Open) -> None:
    page = open_page(failing(), java_script_enabled=False)
    assert page.locator(".requirement:visible").count() == 29
    playwright.expect(page.get_by_text("OVL-2 on rank 1")).to_be_visible()
    assert page.locator("button:visible").count() == 0


def test_print_shows_every_requirement_whatever_the_filter(open_page: Open) -> None:
    page = open_page(failing(), color_scheme="dark")
    page.get_by_role("button", name="Skipped 2").click()
    page.emulate_media(media="print")
    assert page.locator(".requirement:visible").count() == 29
    assert page.locator("button:visible").count() == 0
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_keeps_a_contrast_of_four_and_a_half(open_page: Open, scheme: str) -> None:
    contrast, where = open_page(failing(is_simulated=True), color_scheme=scheme).evaluate(LOWEST_CONTRAST)
    assert contrast >= 4.5, where
