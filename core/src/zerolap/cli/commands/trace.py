"""`zerolap trace`: how much of the communication was hidden."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from zerolap.cli.console import AsJson, err, fail, fails_plainly, out, shown


@fails_plainly
def trace(
    paths: Annotated[
        list[Path], typer.Argument(help="Folders that handle.trace(path=...) has written to, or files of ranks.")
    ],
    page: Annotated[Path | None, typer.Option("--out", help="Write the timeline there: one HTML page.")] = None,
    chrome: Annotated[
        Path | None, typer.Option("--chrome", help="Write a Chrome trace there, for ui.perfetto.dev.")
    ] = None,
    as_json: AsJson = False,
    is_opened: Annotated[
        bool | None,
        typer.Option(
            "--open/--no-open",
            help="Open the timeline in a browser; without --out it is written beside the traces. Done in a terminal, "
            "unless --out, --chrome or --json says where else it goes.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Say how much of the communication was hidden, and show it. Needs no torch.

    Exit code 1 if a file is no trace, or files do not belong together; 2 if there is none.
    """
    from zerolap.cli import trace as timelines

    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise fail(f"{', '.join(missing)} does not exist", code=2)
    if is_opened is None:
        is_opened = sys.stdout.isatty() and page is None and chrome is None and not as_json
    if is_opened and page is None:
        page = (paths[0] if paths[0].is_dir() else paths[0].parent) / "timeline.html"
    try:
        found = timelines.examine(paths)
        written = [timelines.write(path, text) for path, text in found.files(page=page, chrome=chrome)]
    except (ValueError, OSError) as error:
        raise fail(str(error)) from error
    if as_json:
        typer.echo(json.dumps(found.to_json() | {"written": [str(path) for path in written]}, indent=1))
    else:
        timelines.show(found, out)
        for path in written:
            out.print(f"written: {shown(path)}")
    if found.run.missing:
        few, more = found.run.missing[:20], len(found.run.missing) - 20
        said = ", ".join(map(str, few)) + (f" and {more} others" if more > 0 else "")
        err.print(f"[yellow]zerolap:[/yellow] no trace of rank {said} was given")
    if is_opened and page is not None and not timelines.open_page(page):
        err.print(f"[yellow]zerolap:[/yellow] no browser could be started; open {shown(page.absolute())} yourself")
