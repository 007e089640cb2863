"""The verdict of a run: as data (JSON, schema 1), as text for a terminal, and as a page."""

from __future__ import annotations

import datetime
import json
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import zerolap
from zerolap import Adapter
from zerolap_conformance.ranks import try_ranks
from zerolap_conformance.requirements import TIERS, all_requirements
from zerolap_conformance.run import Result

SCHEMA = 1


def make(results: Mapping[str, Result], *, adapter: str, num_ranks: int, tier: int, seconds: float) -> dict[str, Any]:
    """Everything that is known of a run, as plain data."""
    known = all_requirements()
    facts = _facts(adapter, num_ranks)
    outcomes = Counter(result.outcome for result in results.values())
    is_whole = all(each in results for each, requirement in known.items() if requirement.tier <= tier)
    return {
        "schema": SCHEMA,
        "adapter": facts["adapter"],
        "asked": {"tier": tier, "ranks": num_ranks},
        "is_whole": is_whole,
        "is_conformant": is_whole and outcomes["failed"] == 0 and outcomes["passed"] > 0,
        "is_simulated": facts["is_simulated"],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "environment": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "zerolap": zerolap.__version__,
            "devices": facts["devices"],
            "advice": facts["advice"],
        },
        "tiers": {str(number): name for number, name in TIERS.items()},
        "requirements": [
            {
                "id": each,
                "tier": known[each].tier,
                "sentence": known[each].sentence,
                "capability": known[each].capability,
                **{key: value for key, value in asdict(results[each]).items() if key != "id"},
            }
            for each in known
            if each in results
        ],
    }


def _facts(adapter: str, num_ranks: int) -> dict[str, Any]:
    """What the ranks say of the adapter and its devices; as little as is known if they cannot."""
    outcomes = try_ranks(num_ranks, _facts_of_rank, adapter=adapter, limit=60)
    said = [outcome.value for outcome in outcomes if outcome.error is None]
    if not said:
        names = {"name": adapter, "device_type": "unknown", "backend": "unknown", "capabilities": {}}
        return {"adapter": names, "is_simulated": False, "devices": [], "advice": []}
    return {**said[0], "devices": [facts["device"] for facts in said]}


def _facts_of_rank(adapter: Adapter) -> dict[str, Any]:
    module = getattr(torch, adapter.device_type, None)
    name = adapter.device_type
    if hasattr(module, "get_device_name"):
        name = str(module.get_device_name())  # type: ignore[union-attr]
    elif adapter.device_type == "cpu":
        name = platform.processor() or platform.machine()
    return {
        "adapter": {
            "name": adapter.name,
            "device_type": adapter.device_type,
            "backend": adapter.backend,
            "capabilities": asdict(adapter.capabilities),
        },
        "is_simulated": "simulated" in name,
        "device": name,
        "advice": adapter.diagnose(),
    }


def to_text(verdict: Mapping[str, Any]) -> str:
    """A table of tiers, and what failed."""
    lines = [f"{'tier':<40} {'passed':>6} {'failed':>6} {'skipped':>7}"]
    for number, name in verdict["tiers"].items():
        of_tier = [each for each in verdict["requirements"] if each["tier"] == int(number)]
        counts = Counter(each["outcome"] for each in of_tier)
        if of_tier:
            lines.append(f"{number} {name:<38} {counts['passed']:>6} {counts['failed']:>6} {counts['skipped']:>7}")
    for each in verdict["requirements"]:
        if each["outcome"] == "waived":
            lines.append(f"waived {each['id']}: {each['sentence']} {each['reason']}")
        elif each["outcome"] == "skipped":
            lines.append(f"skipped {each['id']}: {each['reason']}")
        elif each["outcome"] == "failed":
            lines.append(f"FAILED {each['id']}: {each['sentence']}")
        lines += [f"note {each['id']}: {note}" for note in each["notes"]]
    lines.append(conclusion(verdict))
    return "\n".join(lines)


def conclusion(verdict: Mapping[str, Any]) -> str:
    """One sentence, which says what was asked for."""
    asked, tried = verdict["asked"], verdict["requirements"]
    counts = Counter(each["outcome"] for each in tried)
    simulated = ", on a simulated device" if verdict["is_simulated"] else ""
    where = f"tier {asked['tier']} on {asked['ranks']} ranks{simulated}"
    name, size = verdict["adapter"]["name"], f"{len(tried)} requirements, {verdict['seconds']} s"
    if not verdict.get("is_whole", True):
        return f"no verdict on {name}: of tier {asked['tier']} a part was tried, {counts['failed']} of {len(tried)} failed ({where}, {size})"
    word = "conforms" if verdict["is_conformant"] else "does not conform"
    waived = f", with {counts['waived']} waived" if counts["waived"] else ""
    return f"{name} {word} at {where}{waived} ({size})"


def write(verdict: Mapping[str, Any], folder: Path) -> list[Path]:
    """verdict.json, and verdict.html to look at."""
    from zerolap_conformance.compare import badge
    from zerolap_conformance.page import to_html

    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "verdict.json", folder / "verdict.html", folder / "badge.svg"]
    written[0].write_text(json.dumps(verdict, indent=1) + "\n")
    written[1].write_text(to_html(verdict))
    written[2].write_text(badge(verdict))
    return written
