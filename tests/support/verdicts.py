"""Verdicts made by hand: one that passes, and one with two failures. No torch."""

from __future__ import annotations

from typing import Any

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
