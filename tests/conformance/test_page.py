"""The page of a verdict: what it says, that nothing in a verdict can break it, and that it fetches nothing."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from support.verdicts import TIERS, failing, passing, requirement
from zerolap_conformance.page import to_html

HOSTILE = "</pre><script>alert('x')</script> & \x1b[31mred\x1b[0m \"quoted\" ${title} \x00\x1b]0;title\x07\udc80"


class Page(HTMLParser):
    """Reads a page strictly: every element is closed by its own tag, in order, and ids are unique."""

    VOID = ("meta", "link", "br", "hr", "img", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"
        assert len(self.ids) == len(set(self.ids)), f"ids that occur twice in {self.ids}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self._note(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        expected = self.open.pop() if self.open else None
        assert tag == expected, f"</{tag}> at {self.getpos()}, expected </{expected}>"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words += data

    def _note(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> at {self.getpos()} repeats an attribute: {names}"
        fields = dict(attrs)
        self.tags.append((tag, fields))
        if fields.get("id"):
            self.ids.append(str(fields["id"]))


@pytest.mark.parametrize("verdict", [passing(), failing(), failing(is_simulated=True), passing(requirements=[])])
def test_page_is_well_formed_and_every_link_on_it_leads_somewhere(verdict: dict[str, Any]) -> None:
    page = Page(to_html(verdict))
    links = {str(fields["href"]) for tag, fields in page.tags if tag in ("a", "use")}
    assert {link[1:] for link in links} <= set(page.ids), links


def test_page_fetches_nothing() -> None:
    text = to_html(failing())
    assert not re.search(r"https?://|@import|url\(", text)
    for tag, fields in Page(text).tags:
        assert "src" not in fields, (tag, fields)
        assert str(fields.get("href", "#")).startswith(("#", "data:")), (tag, fields)


@pytest.mark.parametrize(
    ("verdict", "headline"),
    [
        (passing(), "acme conforms at tier 3"),
        (failing(), "acme does not conform at tier 3: 2 of 29 requirements failed"),
        (passing(is_conformant=False), "acme does not conform at tier 3: only 27 of 29 requirements passed"),
    ],
)
def test_headline_says_the_verdict_and_how_many_failed(verdict: dict[str, Any], headline: str) -> None:
    text = to_html(verdict)
    (title,) = re.findall(r"<title>(.*)</title>", text)
    (heading,) = re.findall(r"<h1>(.*)</h1>", text)
    assert title == f"{headline} | zerolap conformance"
    assert re.sub(r"</?span>", "", heading) == headline


def test_tiers_are_counted_one_by_one_and_together() -> None:
    rows = re.findall(r"<tr><th.*?</tr>", to_html(failing()))[1:]
    numbers = [re.findall(r"<td[^>]*>(?:<a[^>]*>)?([^<]+)", row) for row in rows]
    assert numbers == [
        ["6", "0", "0", "0"],
        ["8", "0", "0", "0"],
        ["6", "1", "2", "0"],
        ["5", "1", "0", "0"],
        ["not asked for"],
        ["not asked for"],
        ["25", "2", "2", "0"],
    ]


def test_failures_are_linked_from_the_header_and_stand_open() -> None:
    text = to_html(failing())
    header = text[text.index("<header>") : text.index("</header>")]
    assert '<a href="#COL-4">2 failed</a>' in header
    assert '<a href="#OVL-2">OVL-2</a>' in header
    assert text.count("<details open>") == 2
    assert "seen on rank 1:     tensor([1., 1., 3., 3.])" in text


def test_first_failure_is_the_first_on_the_page_whatever_the_order_of_the_verdict() -> None:
    verdict = failing()
    verdict["requirements"].reverse()
    assert '<a href="#COL-4">2 failed</a>' in to_html(verdict)


def test_filters_count_what_they_show_and_an_empty_one_is_disabled() -> None:
    buttons = re.findall(r"<button[^>]*?( disabled)?>(\w+ \d+)</button>", to_html(passing()))
    assert buttons == [("", "All 29"), (" disabled", "Failed 0"), ("", "Skipped 2"), ("", "Notes 2")]


def test_skip_says_its_capability_and_reason() -> None:
    words = Page(to_html(passing())).words
    assert words.count("Applies with has_float64") == 2
    assert words.count("the adapter declares has_float64 = False") == 2


def test_simulated_device_is_named_in_title_and_header_and_only_then() -> None:
    text = to_html(passing(is_simulated=True))
    assert "acme conforms at tier 3 (simulated device)" in text[: text.index("</title>")]
    assert "Simulated device" in text[text.index("<header>") : text.index("<h1>")]
    assert "simulated device" not in Page(to_html(passing())).words.lower()


def test_environment_is_told_in_full() -> None:
    words = Page(to_html(passing())).words
    for expected in ("2 \N{MULTIPLICATION SIGN} Acme X1", "2.13.0", "acmeccl", "ACME_HIGH_PRIORITY=1", "1 min 21 s"):
        assert expected in words
    assert "2026-11-16 07:20 UTC" in words


def test_nothing_in_a_verdict_is_taken_for_markup() -> None:
    verdict = failing()
    verdict["adapter"] = {
        "name": HOSTILE,
        "device_type": HOSTILE,
        "backend": HOSTILE,
        "capabilities": {HOSTILE: HOSTILE},
    }
    verdict["environment"] = {HOSTILE: HOSTILE, "devices": [HOSTILE, HOSTILE], "advice": [HOSTILE]}
    verdict["tiers"] = dict.fromkeys(TIERS, HOSTILE)
    verdict["requirements"] = [
        requirement(
            f"COL-{outcome}{HOSTILE}", 2, outcome, sentence=HOSTILE, capability=HOSTILE, reason=HOSTILE, notes=[HOSTILE]
        )
        for outcome in ("passed", "failed", "skipped")
    ]
    text = to_html(verdict)
    text.encode("utf-8")
    page = Page(text)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    assert "[31m" not in text
    assert "0;title" not in text
    assert "</pre><script>alert('x')</script> & red \"quoted\" ${title} ?" in page.words


def test_unknown_schema_and_unknown_outcome_are_refused() -> None:
    with pytest.raises(ValueError, match="schema 1, got schema 2"):
        to_html(passing(schema=2))
    with pytest.raises(ValueError, match="passed, failed, skipped, waived; got flaky"):
        to_html(passing(requirements=[requirement("COL-1", 2, "flaky")]))
