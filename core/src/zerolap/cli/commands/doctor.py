"""`zerolap doctor`: what is installed, and which devices can be used."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from zerolap.cli.console import AsJson, err, fails_plainly, out


@fails_plainly
def doctor(
    as_json: AsJson = False,
    is_tried: Annotated[
        bool, typer.Option("--try", help="Train a few steps on two ranks, on each usable device.")
    ] = False,
) -> None:
    """Say what is installed, which devices can be used and why others cannot, and what to change in the environment.

    Exit code 0 if some device can be used, and, with --try, trained on.
    """
    from zerolap.cli import doctor as checkup

    found = checkup.examine()
    if is_tried:
        for adapter in found["adapters"]:
            if adapter["why_unusable"] is None:
                with err.status(f"training on two ranks with {adapter['name']} ..."):
                    adapter["tried"] = checkup.attempt(adapter["name"])
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        checkup.show(found, out)
    raise typer.Exit(checkup.exit_code(found))
