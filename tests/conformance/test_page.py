"""The page of a verdict: what it says, that nothing in a verdict can break it, and that it fetches nothing."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from zerolap_conformance.page import to_html

HOSTILE = "</pre><script>alert('x')</script> & \x1b[31mred\x1b[0m \"quoted\" ${title} \x00\x1b]0;title\x07\udc80"
SEEN = """Traceback (most recent call last):
  File "/srv/acme/lib/python3.11/site-packages/zerolap_conformance/collectives.py", line 214, in check_sum
    assert torch.equal(seen, expected), explain(seen, expected)
AssertionError: expected on rank 1: tensor([3., 3., 3., 3.])
                seen on rank 1:     tensor([1., 1., 3., 3.])
the sum is missing the other rank's first 2 elements: did the collective start before the copy on the compute lane ended?"""
TIERS = {
    "0": "the adapter and its device",
    "1": "lanes, events, lifetimes",
    "2": "collectives against arithmetic",
    "3": "overlap against the oracle",
    "4": "stress",
    "5": "performance",
}
SENTENCES = {
    "ADP": "The adapter names its device type, and a tensor made there says the same.",
    "LAN": "Work on a lane that waits for an event sees everything that was written before the event was recorded.",
    "COL": "A reduce-scatter leaves the sum over all ranks of a rank's own shard in that rank's output, and touches nothing else.",
    "OVL": "Parameters after three overlapped steps equal those of DDP and the plain optimizer, bit for bit.",
}


def requirement(name: str, tier: int, outcome: str = "passed", **fields: Any) -> dict[str, Any]:
    """One entry of a verdict, with nothing said that is not asked for."""
    given = {"id": name, "tier": tier, "outcome": outcome, "sentence": SENTENCES[name[:3]], **fields}
    return {"capability": None, "reason": "", "notes": [], "seconds": 0.4, **given}


def passing(**fields: Any) -> dict[str, Any]:
    """A verdict of tier 3 with 27 passed and 2 skipped."""
    sizes = {"ADP": 6, "LAN": 8, "COL": 9, "OVL": 6}
    requirements = [
        requirement(f"{area}-{number}", tier, seconds=number * 0.7)
        for tier, (area, size) in enumerate(sizes.items())
        for number in range(1, size + 1)
    ]
    reason = "the adapter declares has_float64 = False"
    for number in (2, 5):
        entry = next(each for each in requirements if each["id"] == f"COL-{number}")
        entry.update(outcome="skipped", capability="has_float64", reason=reason)
    requirements[3]["notes"] = ["device 0 and device 1 report the same name"]
    requirements[-1]["notes"] = ["62 % of communication ran under the backward pass", "4 buckets, 25 MB each"]
    return {
        "schema": 1,
        "adapter": {
            "name": "acme",
            "device_type": "acme",
            "backend": "acmeccl",
            "capabilities": {
                "futures_complete_at_enqueue": True,
                "exact_cut": 1,
                "has_float64": False,
                "one_issue_order": True,
            },
        },
        "asked": {"tier": 3, "ranks": 2},
        "is_conformant": True,
        "is_simulated": False,
        "date": "2026-11-16T08:20:00+01:00",
        "seconds": 81.2,
        "environment": {
            "torch": "2.13.0",
            "python": "3.11.7",
            "platform": "Linux-6.8.0-45-generic-x86_64-with-glibc2.39",
            "zerolap": "0.1.0",
            "devices": ["Acme X1", "Acme X1"],
            "advice": ["set ACME_HIGH_PRIORITY=1: without it, communication waits behind the backward pass"],
        },
        "tiers": TIERS,
        "requirements": requirements,
        **fields,
    }


def failing(**fields: Any) -> dict[str, Any]:
    """The same run with COL-4 and OVL-2 failed."""
    verdict = passing(is_conformant=False, **fields)
    for each in verdict["requirements"]:
        if each["id"] in ("COL-4", "OVL-2"):
            each.update(outcome="failed", reason=f"{each['id']} on rank 1\n{SEEN}")
    return verdict


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
        ["6", "0", "0"],
        ["8", "0", "0"],
        ["6", "1", "2"],
        ["5", "1", "0"],
        ["not asked for"],
        ["not asked for"],
        ["25", "2", "2"],
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
    with pytest.raises(ValueError, match="passed, failed, skipped; got flaky"):
        to_html(passing(requirements=[requirement("COL-1", 2, "flaky")]))
