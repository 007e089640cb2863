"""A verdict as one HTML page that a vendor can publish: text in, text out. It runs nothing and judges nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from importlib.resources import files
from string import Template
from typing import Any
from urllib.parse import quote

_OUTCOMES = ("passed", "failed", "skipped", "waived")
_LABELS = {"torch": "PyTorch", "python": "Python", "platform": "Platform", "devices": "Devices"}
_SIMULATED = (
    '<p class="simulated"><strong>Simulated device</strong> '
    "This run used a simulation in place of hardware. It says nothing about a real device.</p>"
)

# A terminal's colours, titles and links; then every other control character, which HTML has no place for.
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])|\x9b[0-?]*[ -/]*[@-~]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def to_html(verdict: Mapping[str, Any]) -> str:
    """The verdict (schema 1) as one self-contained page."""
    if verdict["schema"] != 1:
        raise ValueError(f"a page shows a verdict of schema 1, got schema {verdict['schema']!r}: update this package")
    # In the order of the page, so that the first failure which a link leads to is the first one a reader would meet.
    requirements: list[Mapping[str, Any]] = sorted(verdict["requirements"], key=lambda each: int(each["tier"]))
    if unknown := sorted({str(each["outcome"]) for each in requirements} - set(_OUTCOMES)):
        raise ValueError(f"an outcome is one of {', '.join(_OUTCOMES)}; got {', '.join(unknown)}")
    headline = _headline(verdict)
    label = " (simulated device)" if verdict["is_simulated"] else ""
    names = {int(tier): str(name) for tier, name in verdict["tiers"].items()}
    by_tier: dict[int, list[Mapping[str, Any]]] = {
        tier: [each for each in requirements if each["tier"] == tier]
        for tier in sorted({*names, *(each["tier"] for each in requirements)})
    }
    return Template(files(__package__).joinpath("page.html").read_text("utf-8")).substitute(
        title=_text(f"{' '.join(headline)}{label} | zerolap conformance"),
        when=_when(verdict["date"]),
        simulated=_SIMULATED if verdict["is_simulated"] else "",
        accent="passed" if verdict["is_conformant"] else "failed",
        # Each half breaks as a whole where it can: a line that ends in "at tier" reads badly.
        headline=" ".join(f"<span>{_text(half)}</span>" for half in headline),
        counts=_counts(requirements, seconds=verdict["seconds"]),
        facts=_facts(verdict),
        advice=_advice(verdict["environment"].get("advice", ())),
        capabilities=_definitions(
            (f"<code>{_text(name)}</code>", _value(value)) for name, value in verdict["adapter"]["capabilities"].items()
        ),
        rows="\n".join(
            _row(tier, names.get(tier, ""), members, is_asked=tier <= verdict["asked"]["tier"])
            for tier, members in by_tier.items()
        ),
        total=f'<tr><th scope="row">All</th>{_cells(requirements)}</tr>',
        filters=_filters(requirements),
        tiers="\n".join(_tier(tier, names.get(tier, ""), members) for tier, members in by_tier.items() if members),
        footer=f"Written by zerolap-conformance from a verdict of schema {_text(verdict['schema'])}.",
    )


def _headline(verdict: Mapping[str, Any]) -> list[str]:
    name, tier, requirements = verdict["adapter"]["name"], verdict["asked"]["tier"], verdict["requirements"]
    if verdict["is_conformant"]:
        return [f"{name} conforms at tier {tier}"]
    if not verdict.get("is_whole", True):
        return [f"No verdict on {name}:", f"a part of tier {tier} was tried"]
    num_failed, num_passed = len(_of(requirements, "failed")), len(_of(requirements, "passed"))
    total = "1 requirement" if len(requirements) == 1 else f"{len(requirements)} requirements"
    # A verdict can be negative with no failure in it, as when too much was skipped: "0 failed" would explain nothing.
    count = f"{num_failed} of {total} failed" if num_failed else f"only {num_passed} of {total} passed"
    return [f"{name} does not conform at tier {tier}:", count]


def _counts(requirements: Sequence[Mapping[str, Any]], *, seconds: float) -> str:
    items = []
    for outcome in _OUTCOMES:
        found = _of(requirements, outcome)
        if outcome == "waived" and not found:
            continue
        text = f"{len(found)} {outcome}"
        # Only what a reader has to look at is a link: it leads to the first one, whose details stand open.
        is_link = found and outcome != "passed"
        items.append(f'<li class="{outcome}">{_link(found[0], text)}</li>' if is_link else f"<li>{text}</li>")
    items.append(f'<li class="quiet">in {_duration(seconds)}</li>')
    lines = f'<ul class="counts">{"".join(items)}</ul>'
    if failed := _of(requirements, "failed"):
        links = " ".join(_link(each, each["id"]) for each in failed)
        lines += f'\n<p class="failures">Failed: {links}</p>'
    return lines


def _facts(verdict: Mapping[str, Any]) -> str:
    adapter, environment = verdict["adapter"], verdict["environment"]
    facts = [
        ("Adapter", _text(adapter["name"])),
        ("Device type", _text(adapter["device_type"])),
        ("Backend", _text(adapter["backend"])),
        ("Asked for", _text(f"tier {verdict['asked']['tier']}, {verdict['asked']['ranks']} ranks")),
    ]
    facts += [(_text(_LABELS.get(key, key)), _value(each)) for key, each in environment.items() if key != "advice"]
    return _definitions(facts)


def _advice(advice: Sequence[str]) -> str:
    if not advice:
        return ""
    items = "".join(f"<li>{_text(each)}</li>" for each in advice)
    return f'<div class="advice"><h3>Advice for this environment</h3><ul>{items}</ul></div>'


def _row(tier: int, name: str, members: Sequence[Mapping[str, Any]], *, is_asked: bool) -> str:
    number = f'<span class="number">{tier}</span>'
    if not members:
        why = "no requirements" if is_asked else "not asked for"
        head = f'<span class="name">{number}{_text(name)}</span>'
        return f'<tr><th scope="row" class="quiet">{head}</th><td colspan="4" class="none">{why}</td></tr>'
    # Decoration: the cells beside it say the same in numbers.
    strip = "".join(f'<i class="{each["outcome"]}"></i>' for each in members)
    head = f'<span class="name">{number}<a href="#tier-{tier}">{_text(name or f"tier {tier}")}</a></span>'
    return f'<tr><th scope="row">{head}<div class="strip" aria-hidden="true">{strip}</div></th>{_cells(members)}</tr>'


def _cells(members: Sequence[Mapping[str, Any]]) -> str:
    cells = []
    for outcome in _OUTCOMES:
        found = _of(members, outcome)
        is_link = found and outcome == "failed"
        text = _link(found[0], str(len(found))) if is_link else str(len(found))
        cells.append(f'<td class="{outcome if found else "none"}">{text}</td>')
    return "".join(cells)


def _filters(requirements: Sequence[Mapping[str, Any]]) -> str:
    counts = Counter(kind for each in requirements for kind in _kinds(each))
    buttons = []
    for kind, label in (("all", "All"), ("failed", "Failed"), ("skipped", "Skipped"), ("notes", "Notes")):
        disabled = "" if counts[kind] or kind == "all" else " disabled"
        pressed = "true" if kind == "all" else "false"
        buttons.append(
            f'<button type="button" value="{kind}" aria-pressed="{pressed}"{disabled}>{label} {counts[kind]}</button>'
        )
    return "\n".join(buttons)


def _tier(tier: int, name: str, members: Sequence[Mapping[str, Any]]) -> str:
    counts = ", ".join(f"{len(found)} {outcome}" for outcome in _OUTCOMES if (found := _of(members, outcome)))
    title = f"Tier {tier}: {name}" if name else f"Tier {tier}"
    return (
        f'<section class="tier" id="tier-{tier}">\n'
        f'<div class="tier-head"><h3>{_text(title)}</h3><span class="quiet">{counts}</span></div>\n'
        f"<ol>\n{''.join(_requirement(each) for each in members)}</ol>\n</section>"
    )


def _requirement(each: Mapping[str, Any]) -> str:
    outcome = each["outcome"]
    what = [f'<p class="sentence">{_text(each["sentence"])}</p>']
    if each["capability"]:
        what.append(f'<p class="aside">Applies with <code>{_text(each["capability"])}</code></p>')
    if reason := _text(each["reason"]).strip():
        if outcome == "failed":
            # Reachable by keyboard, since it scrolls; open from the start, so that it reads without a script.
            label = f"Details of {_text(each['id'])}"
            block = f'<pre tabindex="0" role="region" aria-label="{label}">{reason}</pre>'
            what.append(f"<details open><summary>Expected and seen</summary>{block}</details>")
        else:
            what.append(f'<p class="aside">{reason}</p>')
    if each["notes"]:
        what.append(f'<ul class="notes">{"".join(f"<li>{_text(note)}</li>" for note in each["notes"])}</ul>')
    mark = f'<svg aria-hidden="true"><use href="#mark-{outcome}"/></svg>'
    return (
        f'<li class="requirement {outcome}" id="{_anchor(each)}" data-kinds="{" ".join(_kinds(each))}">\n'
        f'<span class="outcome">{mark}{outcome}</span>\n'
        f'<span class="id">{_link(each, each["id"])}</span>\n'
        f'<div class="what">{"".join(what)}</div>\n'
        f'<span class="seconds">{_duration(each["seconds"])}</span>\n'
        f"</li>\n"
    )


def _kinds(each: Mapping[str, Any]) -> list[str]:
    return ["all", each["outcome"], *(["notes"] if each["notes"] else [])]


def _of(requirements: Iterable[Mapping[str, Any]], outcome: str) -> list[Mapping[str, Any]]:
    return [each for each in requirements if each["outcome"] == outcome]


def _link(each: Mapping[str, Any], text: str) -> str:
    return f'<a href="#{quote(_anchor(each))}">{_text(text)}</a>'


def _anchor(each: Mapping[str, Any]) -> str:
    return re.sub(r"[^\w.-]", "-", str(each["id"]))


def _definitions(pairs: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"<div><dt>{term}</dt><dd>{value}</dd></div>" for term, value in pairs)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        counted = Counter(str(each) for each in value)
        return _text(
            ", ".join(
                f"{count} \N{MULTIPLICATION SIGN} {each}" if count > 1 else each for each, count in counted.items()
            )
            or "none"
        )
    return _text("none" if value is None else value)


def _when(date: str) -> str:
    when = datetime.fromisoformat(date).astimezone(timezone.utc)
    return f'<time datetime="{when.isoformat()}">{when:%Y-%m-%d %H:%M} UTC</time>'


def _duration(seconds: float) -> str:
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _text(value: Any) -> str:
    """Any value as text that is safe in an element and in a quoted attribute."""
    text = _CONTROL.sub("", _ANSI.sub("", str(value).replace("\r\n", "\n")))
    # What a process printed may hold half characters, which no file can be written with.
    return escape(text.encode("utf-8", "replace").decode("utf-8"))
