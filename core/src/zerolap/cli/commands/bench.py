"""`zerolap bench`: compare with DDP and with other sharded optimizers."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import typer

from zerolap.cli.console import AsJson, exit_code, fail, fails_plainly, need


@fails_plainly
def bench(context: typer.Context, as_json: AsJson = False) -> None:
    """Compare with DDP and with other sharded optimizers, by benchmarks/compare.py of the source tree.

    Takes the options of that program: `zerolap bench -- --help` lists them.
    """
    places = [folder / "benchmarks/compare.py" for folder in (Path(__file__).parents[5], Path.cwd())]
    program = next((place for place in places if place.exists()), None)
    if program is None:
        raise fail(
            "the benchmark is part of zerolap's source tree, not of the installed package, and there is none here; clone the "
            "repository and call `zerolap bench` in its folder",
            code=2,
        )
    need("torch")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(program), *context.args, *(["--out", folder] if as_json else [])]
        code = subprocess.run(command, stdout=sys.stderr if as_json else None).returncode
        if as_json and code == 0:
            typer.echo(Path(folder, "results.json").read_text())
    raise typer.Exit(exit_code(code))
