"""Waivers and comparisons of verdicts: what is said of what failed, and of what is worse than before."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from support.verdicts import failing, passing
from zerolap_conformance.compare import badge, differences
from zerolap_conformance.page import to_html
from zerolap_conformance.run import Result
from zerolap_conformance.verdict import conclusion
from zerolap_conformance.waivers import Waiver, apply, read

TODAY = datetime.date(2027, 1, 15)
WAIVERS = {"COL-4": Waiver(reason="fp16 is summed in tf32 by firmware 3", until=datetime.date(2027, 1, 31))}


def test_what_is_waived_may_fail_until_its_day() -> None:
    failed = Result(id="COL-4", outcome="failed", reason="3 elements differ")
    waived = apply(failed, WAIVERS, today=TODAY)
    assert (waived.outcome, waived.reason) == ("waived", "until 2027-01-31: fp16 is summed in tf32 by firmware 3")
    late = apply(failed, WAIVERS, today=datetime.date(2027, 2, 1))
    assert late.outcome == "failed"
    assert late.reason.startswith("the waiver ended on 2027-01-31")
    assert late.reason.endswith("3 elements differ")
    other = Result(id="COL-5", outcome="failed")
    assert apply(other, WAIVERS, today=TODAY) is other


@pytest.mark.parametrize("outcome", ["passed", "skipped"])
def test_a_waiver_that_no_longer_applies_fails(outcome: Any) -> None:
    result = apply(Result(id="COL-4", outcome=outcome), WAIVERS, today=TODAY)
    assert result.outcome == "failed"
    assert result.reason.endswith(f"but {outcome}: remove the waiver")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "cannot be read as waivers"),
        ("[]", "must hold an object of requirements"),
        ('{"COL-99": {"reason": "x", "until": "2027-01-31"}}', "waives COL-99, which is no requirement"),
        ('{"COL-4": {"reason": "x"}}', 'must have a "reason" and a day "until"'),
        ('{"COL-4": {"reason": " ", "until": "2027-01-31"}}', "must say why"),
        ('{"COL-4": {"reason": "x", "until": "soon"}}', "must be a day such as 2027-01-31, got 'soon'"),
    ],
)
def test_a_file_that_is_not_one_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "waivers.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        read(tmp_path / "waivers.json", known=["COL-4"])


def test_a_file_gives_its_waivers(tmp_path: Path) -> None:
    entry = {"reason": WAIVERS["COL-4"].reason, "until": "2027-01-31"}
    (tmp_path / "waivers.json").write_text(json.dumps({"COL-4": entry}))
    assert read(tmp_path / "waivers.json", known=["COL-4"]) == WAIVERS


def test_what_is_waived_is_shown() -> None:
    verdict = passing(is_whole=True)
    verdict["requirements"][4].update(outcome="waived", reason="until 2027-01-31: a bug of firmware 3")
    assert "conforms at tier 3 on 2 ranks, with 1 waived" in conclusion(verdict)
    assert "tier 3, 1 waived" in badge(verdict)
    assert "a bug of firmware 3" in to_html(verdict)


def test_a_part_gives_no_verdict_and_no_false_one() -> None:
    verdict = passing(is_whole=False, is_conformant=False)
    assert conclusion(verdict).startswith("no verdict on acme: of tier 3 a part was tried, 0 of 29 failed")
    assert "No verdict on acme" in to_html(verdict)
    assert "no verdict" in badge(verdict)


def test_what_is_worse_is_said() -> None:
    before, after = passing(is_whole=True), failing(is_whole=True)
    lines, is_worse = differences(before, after)
    assert is_worse
    assert "WORSE COL-4: passed, now failed" in lines
    assert lines[-1] == "WORSE: it did conform, and does no longer"
    lines, is_worse = differences(after, before)
    assert not is_worse
    assert "better COL-4: failed, now passed" in lines
    assert differences(before, before) == ([], False)
    newer = passing(is_whole=True)
    newer["environment"]["torch"] = "2.14.0"
    newer["requirements"].pop()
    lines, is_worse = differences(before, newer)
    assert is_worse
    assert lines[0] == "environment: torch was '2.13.0', is '2.14.0'"
