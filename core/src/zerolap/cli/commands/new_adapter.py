"""`zerolap new-adapter`: write the skeleton of an adapter package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from zerolap.cli.console import AsJson, fail, fails_plainly
from zerolap.untrusted.files import printable


@fails_plainly
def new_adapter(
    name: Annotated[str, typer.Argument(help="A short name in lower case, for example acme.")],
    device_type: Annotated[str | None, typer.Option(help="As in torch.device(...); the name if not given.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="As in init_process_group(...); the name and 'ccl' if not given.")
    ] = None,
    has_streams: Annotated[bool, typer.Option("--streams/--no-streams", help="Whether the device has streams.")] = True,
    folder: Annotated[Path | None, typer.Option(help="Where; zerolap-NAME here if not given.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write the skeleton of an adapter package for a device of your own."""
    from zerolap.cli.skeleton import write

    folder = folder or Path(f"zerolap-{name}")
    try:
        written = write(folder, name=name, device_type=device_type, backend=backend, has_streams=has_streams)
    except (ValueError, OSError) as error:
        raise fail(str(error), code=2) from error
    if as_json:
        typer.echo(json.dumps({"written": [str(path) for path in written]}))
        return
    for path in written:
        typer.echo(f"written: {printable(path)}")
    typer.echo(f"next: pip install {printable(folder.absolute())} && zerolap conformance --adapter {name}")
