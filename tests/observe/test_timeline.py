"""What traces mean, on spans made by hand: the verdict's arithmetic, files, clocks, Chrome traces, the page, the command."""

from __future__ import annotations

import json
import os
import pty
import resource
import shlex
import subprocess
import sys
import venv
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support import ROOT
from support.synthetic_runs import run_of, trace_of
from zerolap.observe.timeline import (
    HostClock,
    RankTrace,
    Span,
    TraceError,
    Verdict,
    judge,
    merge,
    read,
    to_chrome,
    to_html,
    write,
)
from zerolap.observe.timeline.verdict import both, union, without


def judged(*spans: Span, seconds: float = 100.0) -> Verdict:
    return judge([trace_of(spans, seconds=seconds)])


# --- the verdict ------------------------------------------------------------------------------------------------------


def test_intervals_are_joined_cut_and_shared() -> None:
    assert union([(3, 4), (0, 1), (1, 2), (5, 5), (3.5, 6)]) == [(0, 2), (3, 6)]
    assert both([(0, 2), (3, 6)], [(1, 4), (5, 9)]) == [(1, 2), (3, 4), (5, 6)]
    assert without([(0, 2), (3, 6)], [(1, 4)]) == [(0, 1), (4, 6)]
    assert without([(0, 2)], []) == [(0, 2)]
    assert without([(0, 2)], [(0, 2)]) == []


def test_nothing_to_hide_is_no_percentage() -> None:
    verdict = judged(Span("forward", None, 0, 1), Span("step", 0, 1, 2, 1))
    assert verdict.hidden_percent is None
    assert str(verdict) == "there was no communication in this trace"


def test_communication_that_nobody_waits_for_is_hidden() -> None:
    verdict = judged(Span("reduce", 0, 0, 4, 1), Span("step", 0, 4, 5, 1), Span("gather", 0, 5, 6, 1))
    assert verdict.hidden_percent == 100
    assert verdict.communication_ms == pytest.approx(5000)
    assert str(verdict) == "100 % of communication hidden"


def test_collectives_at_once_count_once() -> None:
    verdict = judged(Span("reduce", 0, 0, 6, 1), Span("reduce", 1, 2, 8, 1), Span("gather", 0, 9, 10, 1))
    assert verdict.communication_ms == pytest.approx(9000)


def test_a_first_use_that_waits_is_exposed_and_named() -> None:
    verdict = judged(
        Span("gather", 3, 0.0, 0.112, 1),
        Span("step", 3, -0.1, 0.0, 1),
        Span("use", 3, 0.1, 0.112, 1, "blocks.0.attn"),
    )
    assert verdict.exposed_ms == pytest.approx(12)
    assert (
        str(verdict)
        == "89 % of communication hidden; bucket 3's gather exposes 12 ms an update: first used by `blocks.0.attn`"
    )


def test_at_the_end_of_backward_the_lane_tells_what_is_waited_for() -> None:
    # Blocked from 10 to 20: the lane waits for bucket 1 until 14, updates until 17, and waits for its gather until 20.
    verdict = judged(
        Span("reduce", 1, 4, 14, 1),
        Span("wait", 1, 6, 14, 1, "reduce"),
        Span("step", 1, 14, 17, 1),
        Span("gather", 1, 17, 20, 1),
        Span("wait", 1, 18, 20, 1, "gather"),
        Span("blocked", None, 10, 20, 1, "backward's end"),
    )
    assert verdict.communication_ms == pytest.approx(13e3)
    assert verdict.exposed_ms == pytest.approx(7e3)
    assert verdict.update_ms == pytest.approx(3e3)
    assert verdict.hidden_percent == pytest.approx(100 * (1 - 7 / 13))
    found = [(each.kind, each.bucket, each.milliseconds_per_update) for each in verdict.exposures]
    # A second from 17 to 18 is nobody's: the gather was under way, but the lane did not say that it waited for it.
    assert found == [
        ("reduce", 1, pytest.approx(4e3)),
        ("gather", 1, pytest.approx(2e3)),
        (None, None, pytest.approx(1e3)),
    ]
    assert verdict.exposures[0].where == "backward's end waits for it"


def test_waiting_while_nothing_is_under_way_is_not_communication() -> None:
    verdict = judged(Span("reduce", 0, 0, 1, 1), Span("blocked", None, 5, 9, 1, "step()"))
    assert verdict.hidden_percent == 100
    assert verdict.exposures == []


def test_waiting_for_updates_alone_is_told_as_such() -> None:
    verdict = judged(
        Span("reduce", 0, 0, 10, 1), Span("step", 0, 10, 20, 1), Span("blocked", None, 10, 20, 1, "step()")
    )
    assert verdict.exposed_ms == 0
    assert str(verdict) == "100 % of communication hidden; training waits 10000 ms an update for shards to be updated"


def test_what_is_under_way_when_the_trace_ends_counts_until_then() -> None:
    assert judged(Span("gather", 0, 4, 50, 1), seconds=5.0).communication_ms == pytest.approx(1000)


def test_a_percentage_is_never_rounded_up() -> None:
    verdict = judged(Span("gather", 0, 0, 10, 1), Span("use", 0, 9.998, 10, 1, "head"))
    assert str(verdict).startswith("99 % of communication hidden; bucket 0's gather exposes 2.0 ms an update")


def test_times_are_per_update_on_the_average_of_ranks() -> None:
    def rank(number: int, wait: float) -> RankTrace:
        spans = [
            span
            for update in (1, 2)
            for start in [10.0 * update]
            for span in (
                Span("step", 0, start, start, update),
                Span("gather", 0, start, start + 4, update),
                Span("use", 0, start + 4 - wait, start + 4, update, "head"),
            )
        ]
        return trace_of(spans, rank=number, num_ranks=2)

    verdict = judge([rank(0, 1), rank(1, 3)])
    assert verdict.num_updates == 2
    assert verdict.communication_ms == pytest.approx(4000)
    assert verdict.exposed_ms == pytest.approx(2000)
    assert verdict.hidden_percent == pytest.approx(50)
    assert verdict.hidden_percent_by_rank == {0: pytest.approx(75), 1: pytest.approx(25)}
    assert verdict.exposures[0].worst_rank == 1


def test_waiting_for_a_rank_that_has_not_begun_is_told_apart() -> None:
    early = [
        Span("reduce", 0, 1, 9, 1),
        Span("wait", 0, 1, 9, 1, "reduce"),
        Span("step", 0, 9, 9, 1),
        Span("blocked", None, 2, 9, 1, "backward's end"),
    ]
    late = [Span("reduce", 0, 7, 9, 1), Span("step", 0, 9, 9, 1)]
    verdict = judge([trace_of(early, num_ranks=2), trace_of(late, rank=1, num_ranks=2)])
    assert verdict.exposed_ms == pytest.approx(7e3 / 2)
    assert verdict.late_ms == pytest.approx(5e3 / 2), "from 2 to 7"
    assert judge([trace_of(early, num_ranks=2)]).late_ms is None, "with a rank missing nobody knows"


def test_many_small_exposures_are_told_by_their_sum() -> None:
    spans = []
    for bucket in range(10):
        start = 10.0 * bucket
        spans += [
            Span("gather", bucket, start, start + 5, 1),
            Span("use", bucket, start + 4, start + 5, 1, f"b{bucket}"),
        ]
    assert str(judged(*spans, Span("step", 0, 0, 0, 1))) == (
        "80 % of communication hidden; 10000 ms an update exposed, most by bucket 0's gather, 1000 ms: first used by `b0`"
    )


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_says_what_the_trace_said(tmp_path: Path) -> None:
    (trace,) = run_of(1, 3, 2)
    path = write(trace, tmp_path / "made" / "on the way")
    assert path.name == "rank0.json"
    (back,) = read([path.parent])
    assert replace(back, spans=()) == replace(trace, spans=())
    for ours, theirs in zip(back.spans, trace.spans, strict=True):
        assert ours[:2] + ours[4:] == theirs[:2] + theirs[4:]
        assert ours[2:4] == pytest.approx(theirs[2:4], abs=1e-6)
    assert [each.name for each in path.parent.iterdir()] == ["rank0.json"]


def test_what_cannot_be_written_whole_is_not_written(tmp_path: Path) -> None:
    (trace,) = run_of(1, 3, 1)
    write(trace, tmp_path)
    before = (tmp_path / "rank0.json").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write(replace(trace, seconds=1.0), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "rank0.json").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def _file(folder: Path, **changes: Any) -> Path:
    path = write(run_of(1, 2, 1)[0], folder)
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "left out"}))
    return path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"zerolap_trace": "left out"}, "is not a trace of zerolap"),
        ({"zerolap_trace": 2}, "has schema 2"),
        ({"clock": "left out"}, "is damaged: KeyError: 'clock'"),
        ({"spans": [["sleep", 0, 0, 1, 1, None]]}, "is damaged: ValueError: no such span"),
        ({"spans": [["reduce", 0, 5, 1, 1, None]]}, "is damaged: ValueError: no such span"),
        ({"spans": [["reduce", 0]]}, "is damaged: ValueError: no such span"),
        ({"rank": 7}, "is damaged: ValueError: rank 7 is none of"),
    ],
)
def test_a_damaged_file_is_refused_with_its_name(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = _file(tmp_path, **changes)
    with pytest.raises(TraceError, match=said) as caught:
        read([path])
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([""], "not a trace of zerolap"),
        (["x"], "cannot be read"),
        ([], "no trace was"),
    ],
)
def test_what_is_no_trace_at_all_is_refused(tmp_path: Path, names: list[str], said: str) -> None:
    (tmp_path / "rank0.json").write_text("[]")
    with pytest.raises(TraceError, match=said):
        read([tmp_path / name for name in names])


def test_a_trace_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_text('{"zerolap_trace": 1, "sp')
    with pytest.raises(TraceError, match="cannot be parsed as JSON"):
        read([tmp_path])


# --- one clock --------------------------------------------------------------------------------------------------------


def test_ranks_of_one_host_share_a_clock() -> None:
    first, second = run_of(2, 3, 2)
    later = replace(second, clock=replace(second.clock, begin=second.clock.begin + 0.25))
    run = merge([later, first])
    assert [trace.rank for trace in run.traces] == [0, 1]
    assert run.traces[1].spans[0].start == pytest.approx(second.spans[0].start + 0.25)
    assert "one host" in run.clock


def test_clocks_of_different_hosts_are_aligned_by_the_collectives() -> None:
    """Two clocks that differ by an unknown amount, and system clocks that are wrong, too."""
    first, second = run_of(2, 20, 3)
    moved = replace(
        second, clock=HostClock(host="another", begin=second.clock.begin - 777.0, unix=second.clock.unix + 40)
    )
    run = merge([first, moved])
    off = run.traces[1].spans[0].start - second.spans[0].start
    assert abs(off) < 1e-3, off
    assert "2 hosts, whose clocks were aligned by the collectives, to within" in run.clock
    said = float(run.clock.split("within ")[1].split(" ms")[0]) / 1e3
    assert abs(off) <= said


def test_without_collectives_in_common_the_systems_clock_counts() -> None:
    first, second = (trace_of([Span("forward", None, 0, 1, 1)], rank=rank, num_ranks=2) for rank in range(2))
    moved = replace(second, clock=HostClock(host="another", begin=5.0, unix=first.clock.unix + 3))
    run = merge([first, moved])
    assert run.traces[1].spans[0].start == pytest.approx(3)
    assert "ranks 1 by their system's clock" in run.clock


def test_traces_that_do_not_belong_together_are_refused() -> None:
    first, second = run_of(2, 2, 1)
    with pytest.raises(TraceError, match="ranks 0 and 1 are of different runs"):
        merge([first, replace(second, run="another")])
    with pytest.raises(TraceError, match="rank 0 was given twice"):
        merge([first, first])
    later = replace(second, spans=tuple(span._replace(update=span.update + 5) for span in second.spans))
    with pytest.raises(TraceError, match="traced at different times: updates 1 to 1 and 6 to 6"):
        merge([first, later])
    assert merge([second]).missing == (0,)


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_a_chrome_trace_has_every_rank_and_no_bars_that_cross() -> None:
    run = merge(run_of(3, 12, 2))
    chrome = json.loads(json.dumps(to_chrome(run)))
    assert chrome["otherData"]["clock"] == run.clock
    assert chrome["otherData"]["verdict"] == str(judge(run.traces))
    events = chrome["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "i"}
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {name.split()[0] for name in named.values()} == {"training", "reduce", "step", "gather", "exposed"}
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0", "rank 1", "rank 2"}
    bars: dict[Any, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            bars.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert bars.keys() <= named.keys()
    assert sum(map(len, bars.values())) > 3 * 12 * 2 * 3
    for thread, found in bars.items():
        for (start, end), (next_start, next_end) in pairwise(sorted(found, key=lambda bar: (bar[0], -bar[1]))):
            assert next_start >= end - 1e-2 or next_end <= end + 1e-2, (named[thread], start, end, next_start, next_end)


def test_a_page_stands_alone_and_shows_text_as_text() -> None:
    name = 'a`</script><script>alert("1")</script>'
    spans = [Span("gather", 0, 0, 1, 1), Span("use", 0, 0.5, 1, 1, name), Span("step", 0, 0, 0, 1)]
    page = to_html(merge([trace_of(spans)]))
    assert "<script>alert" not in page
    assert "http://" not in page
    assert "https://" not in page
    assert page.count("</script>") == 2
    assert "50 % of communication hidden" in page
    assert "Simulated device" not in page
    assert "Simulated device" in to_html(merge([replace(trace_of(spans), is_simulated=True)]))


def test_a_page_of_nothing_can_be_made() -> None:
    page = to_html(merge([trace_of([])]))
    assert "There was no communication in this trace" in page


# --- the command ------------------------------------------------------------------------------------------------------


def _zerolap(*arguments: object, python: str = sys.executable, paths: tuple[str, ...] = ()) -> Any:
    code = f"import sys; sys.path[:0] = {[str(ROOT / 'core/src'), *paths]}; from zerolap.cli import main; main()"
    command = [python, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command_says_the_verdict_and_writes_pictures(tmp_path: Path) -> None:
    for trace in run_of(2, 6, 2):
        write(trace, tmp_path / "run")
    page, chrome = tmp_path / "page.html", tmp_path / "chrome.json"
    ran = _zerolap("trace", tmp_path / "run", "--out", page, "--chrome", chrome)
    assert ran.returncode == 0, ran.stderr
    verdict = str(judge(merge(read([tmp_path / "run"])).traces))
    assert ran.stdout.startswith(verdict)
    assert "share its monotonic clock" in ran.stdout
    assert verdict.split(";")[0] in page.read_text()
    assert json.loads(chrome.read_text())["otherData"]["verdict"] == verdict
    told = json.loads(_zerolap("trace", tmp_path / "run/rank1.json", "--json").stdout)
    assert told["ranks"] == [1]
    assert told["missing_ranks"] == [0]
    assert told["late_ms"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("{}/nowhere",), 2, "does not exist"),
        (("{}",), 1, "is not a trace of zerolap"),
        (("{}/rank0.json", "--out", "x"), 1, "is not a trace of zerolap"),
        ((), 2, "Missing argument"),
    ],
)
def test_the_command_refuses_what_is_no_run(tmp_path: Path, arguments: tuple[str, ...], code: int, said: str) -> None:
    (tmp_path / "rank0.json").write_text("{}")
    ran = _zerolap("trace", *(argument.format(tmp_path) for argument in arguments))
    assert ran.returncode == code, ran.stderr
    assert said in ran.stderr


def test_the_command_says_where_it_cannot_write(tmp_path: Path) -> None:
    for trace in run_of(1, 2, 1):
        write(trace, tmp_path)
    ran = _zerolap("trace", tmp_path, "--out", tmp_path / "no/such/folder.html")
    assert ran.returncode == 1
    assert "cannot be written: No such file or directory" in ran.stderr


def test_in_a_terminal_the_command_opens_the_timeline_unless_it_goes_elsewhere(tmp_path: Path) -> None:
    for trace in run_of(2, 4, 1):
        write(trace, tmp_path / "run")
    browser, asked = tmp_path / "browser", tmp_path / "asked"
    browser.write_text(f'#!/bin/sh\necho "$1" >> {shlex.quote(str(asked))}\n')
    browser.chmod(0o755)
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'core/src')!r}); from zerolap.cli import main; main()"

    def call(*arguments: str, is_terminal: bool = True) -> list[str]:
        """The pages that a browser was asked for."""
        asked.write_text("")
        ours, theirs = pty.openpty()
        try:
            done = subprocess.run(
                [sys.executable, "-c", code, "trace", str(tmp_path / "run"), *arguments],
                env={**os.environ, "BROWSER": f"{shlex.quote(str(browser))} %s"},
                stdout=theirs if is_terminal else subprocess.DEVNULL,
                timeout=120,
            )
        finally:
            os.close(ours)
            os.close(theirs)
        assert done.returncode == 0
        return asked.read_text().split()

    page = (tmp_path / "run/timeline.html").as_uri()
    assert call() == [page]
    assert call("--open", is_terminal=False) == [page]
    assert call("--open", "--json") == [page]
    assert call("--out", str(tmp_path / "x.html"), "--open") == [(tmp_path / "x.html").as_uri()]
    for arguments in (
        ["--no-open"],
        ["--json"],
        ["--out", str(tmp_path / "x.html")],
        ["--chrome", str(tmp_path / "x")],
    ):
        assert call(*arguments) == []
    assert call(is_terminal=False) == [], "programs and pipes get no browser"


def test_the_command_needs_no_torch(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    import rich

    some = tmp_path / "some"
    some.mkdir()
    for path in Path(
        rich.__file__
    ).parent.parent.iterdir():  # all that is installed here, but for torch and what needs it
        if not path.name.lower().startswith(("torch", "functorch", "zerolap", "_zerolap")) and path.suffix != ".pth":
            (some / path.name).symlink_to(path)
    for trace in run_of(2, 4, 1):
        write(trace, tmp_path / "run")
    python = str(tmp_path / "env/bin/python")
    assert subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 1
    ran = _zerolap("trace", tmp_path / "run", "--out", tmp_path / "x.html", python=python, paths=(str(some),))
    assert ran.returncode == 0, ran.stderr
    assert "% of communication hidden" in ran.stdout
