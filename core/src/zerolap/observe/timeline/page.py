"""A run as one HTML page with a timeline, to be opened offline and passed on. It judges nothing; its scripts draw."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from zerolap.observe.timeline.clocks import Run
from zerolap.observe.timeline.record import COMMUNICATION, KINDS, WAIT, RankTrace
from zerolap.observe.timeline.verdict import Sums, Verdict, format_ms, judge_sums, sums_of

_SCRIPTS = ("page_model.js", "page_draw.js", "page_input.js")
_NUM_PARAMS = 3  # of a bucket, by name
_NUM_EXPOSURES = 8
_LEAST_MS = 0.01  # less is not worth a line
_SIMULATED = (
    '<p class="simulated"><strong>Simulated device</strong> '
    "This run used a simulation in place of hardware. It says nothing about a real device.</p>"
)


def to_html(run: Run) -> str:
    """The run as one self-contained page."""
    sums = {trace.rank: sums_of(trace) for trace in run.traces}
    verdict = judge_sums(run.traces, sums)
    first = run.traces[0]
    return Template(_file("page.html")).substitute(
        title=escape(f"{_headline(verdict)} | zerolap trace"),
        style=_file("page.css"),
        script="".join(map(_file, _SCRIPTS)),
        # In a script element nothing is unescaped but what could end it.
        data=json.dumps(_data(run, sums, verdict), separators=(",", ":")).replace("<", "\\u003c"),
        facts=_facts(run),
        simulated=_SIMULATED if first.is_simulated else "",
        headline=escape(_headline(verdict)),
        worst=_worst(verdict),
        share=_share(verdict),
        exposures=_exposures(verdict),
        clock=escape(_sentence(run.clock)),
    )


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


# --- for the reader ---------------------------------------------------------------------------------------------------


def _headline(verdict: Verdict) -> str:
    if verdict.hidden_percent is None:
        return "There was no communication in this trace"
    return f"{int(verdict.hidden_percent)} % of communication hidden"


def _worst(verdict: Verdict) -> str:
    if verdict.hidden_percent is None:
        return ""
    if not verdict.exposures:
        return "Training waited for none of it."
    return f"{_marked(_sentence(verdict.worst))}."


def _share(verdict: Verdict) -> str:
    """The bar under the headline."""
    if verdict.hidden_percent is None:
        return ""
    hidden, exposed = verdict.communication_ms - verdict.exposed_ms, verdict.exposed_ms
    late = f", {format_ms(verdict.late_ms)} of it because other ranks come later" if verdict.late_ms else ""
    parts = [
        ("hidden", hidden, "hidden behind computing"),
        ("exposed", exposed, f"exposed: training waits for it{late}"),
    ]
    bar = "".join(f'<i class="{kind}" style="flex-grow: {value:.6f}"></i>' for kind, value, _ in parts if value > 0)
    said = "".join(
        f'<li class="{kind}"><strong>{format_ms(value)}</strong> {words}</li>' for kind, value, words in parts
    )
    if verdict.update_ms > 0:
        said += f'<li class="update"><strong>{format_ms(verdict.update_ms)}</strong> training waits for updates</li>'
    return (
        f'<div class="share" aria-hidden="true">{bar}</div>\n'
        f'<ul class="amounts"><li>Per update, on the average of ranks:</li>{said}</ul>'
    )


def _exposures(verdict: Verdict) -> str:
    listed = [each for each in verdict.exposures if each.milliseconds_per_update >= _LEAST_MS]
    rows = "".join(
        f'<tr data-kind="{escape(each.kind or "")}" data-bucket="{-1 if each.bucket is None else each.bucket}" '
        f'data-where="{escape(each.where)}">'
        f'<th scope="row">{_marked(_sentence(each.what))}</th><td>{_marked(_sentence(each.where))}</td>'
        f"<td>{format_ms(each.milliseconds_per_update)}</td><td>{each.worst_rank}</td></tr>"
        for each in listed[:_NUM_EXPOSURES]
    )
    if not rows:
        return "<p>Nothing: training waited for no communication.</p>"
    more = len(verdict.exposures) - min(len(listed), _NUM_EXPOSURES)
    note = f'<p class="quiet">{more} smaller ones are not listed.</p>' if more > 0 else ""
    return (
        '<table><thead><tr><th scope="col">What</th><th scope="col">Why it shows</th>'
        '<th scope="col">Per update</th><th scope="col">Worst rank</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>{note}"
    )


def _facts(run: Run) -> str:
    about = run.traces[0].about
    num_ranks = len(run.traces)
    facts = [f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"]
    if run.missing:
        facts[0] += f" of {num_ranks + len(run.missing)}"
    facts += [about[key] for key in ("schedule", "gather", "adapter", "device") if key in about]
    facts += [f"torch {about['torch']}"] if "torch" in about else []
    return " \N{MIDDLE DOT} ".join(map(escape, facts))


def _marked(text: str) -> str:
    """Text in which backquotes stand round code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


# --- for the script ---------------------------------------------------------------------------------------------------


def _data(run: Run, sums: Mapping[int, Sums], verdict: Verdict) -> dict[str, Any]:
    """Numbers in flat lists, times in microseconds: a run of 64 ranks has hundreds of thousands of spans."""
    names: dict[str | None, int] = {None: 0}
    return {
        "kinds": KINDS,
        "communication": COMMUNICATION,
        "seconds": max(trace.seconds for trace in run.traces),
        "buckets": [
            [each.num_bytes, list(each.params[:_NUM_PARAMS]), max(0, len(each.params) - _NUM_PARAMS)]
            for each in run.traces[0].buckets
        ],
        "ranks": [
            _rank(trace, sums[trace.rank], verdict.hidden_percent_by_rank[trace.rank], names) for trace in run.traces
        ],
        "names": list(names),  # last: it has what the lines above have asked for
    }


def _rank(trace: RankTrace, sums: Sums, hidden: float | None, names: dict[str | None, int]) -> dict[str, Any]:
    def place(name: str | None) -> int:
        return names.setdefault(name, len(names))

    def bucket(number: int | None) -> int:
        return -1 if number is None else number

    spans = [
        (KINDS.index(kind), bucket(number), *_micros(start, end), update, place(name))
        for kind, number, start, end, update, name in trace.spans
        if kind != WAIT
    ]
    exposed = [
        (-1 if kind is None else KINDS.index(kind), bucket(number), *_micros(start, end), place(where))
        for start, end, kind, number, where, _ in sums.exposed
    ]
    return {
        "rank": trace.rank,
        "hidden": hidden,
        "spans": [value for row in spans for value in row],
        "exposed": [value for row in exposed for value in row],
        "held": [value for start, end in sums.held_up for value in _micros(start, end)],
    }


def _micros(start: float, end: float) -> tuple[int, int]:
    """Start and length."""
    first = round(start * 1e6)
    return first, round(end * 1e6) - first
