"""What `zerolap trace` does: ranks' traces brought together, written as pictures, and said in words. No torch."""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from zerolap.observe.timeline import Run, Verdict, judge, merge, read, to_chrome, to_html
from zerolap.observe.timeline.verdict import format_ms
from zerolap.untrusted.files import printable, written_whole

_NUM_EXPOSURES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    run: Run
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        return self.verdict.to_json() | {
            "ranks": [trace.rank for trace in self.run.traces],
            "missing_ranks": list(self.run.missing),
            "clock": self.run.clock,
            "is_simulated": any(trace.is_simulated for trace in self.run.traces),
        }

    def files(self, *, page: Path | None, chrome: Path | None) -> Iterator[tuple[Path, str]]:
        if page is not None:
            yield page, to_html(self.run)
        if chrome is not None:
            yield chrome, json.dumps(to_chrome(self.run), separators=(",", ":"))


def examine(paths: Sequence[Path]) -> Found:
    """Everything there is to say; TraceError if the files are no traces of one run."""
    run = merge(read(paths))
    return Found(run=run, verdict=judge(run.traces))


def write(path: Path, text: str) -> Path:
    """Write a file whole, or leave what is there."""
    try:
        with written_whole(path) as stream:
            stream.write(text.encode())
    except OSError as error:
        raise OSError(f"{printable(path)} cannot be written: {error.strerror or error}") from error
    return path


def show(found: Found, console: Console) -> None:
    """For people."""
    verdict, num_ranks = found.verdict, len(found.run.traces)
    console.print(f"[bold]{escape(printable(verdict))}[/bold]")
    if verdict.hidden_percent is not None:
        late = f", {format_ms(verdict.late_ms)} of it because other ranks come later" if verdict.late_ms else ""
        console.print(
            f"per update, on the average of {num_ranks} rank{'s' if num_ranks > 1 else ''} and {verdict.num_updates} updates: "
            f"{format_ms(verdict.communication_ms)} of communication, {format_ms(verdict.exposed_ms)} exposed{late}; "
            f"{format_ms(verdict.update_ms)} waiting for updates"
        )
    for each in verdict.exposures[:_NUM_EXPOSURES]:
        said = f"{each.what}: {each.where} (rank {each.worst_rank} most)"
        console.print(f"    {format_ms(each.milliseconds_per_update):>9}  {escape(printable(said))}")
    if any(trace.is_simulated for trace in found.run.traces):
        console.print("[yellow]on a simulated device, which says nothing about a real one[/yellow]")
    console.print(f"[dim]{escape(printable(found.run.clock))}[/dim]")


def open_page(path: Path) -> bool:
    """Open a page in the user's browser; whether there is one."""
    try:
        return webbrowser.open(path.absolute().as_uri())
    except webbrowser.Error:
        return False
