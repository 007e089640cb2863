"""The command line: registers the commands. Each imports what it needs when it is called, so that help needs neither torch nor time."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import typer

from zerolap.cli.commands.bench import bench
from zerolap.cli.commands.checkpoint import convert, inspect
from zerolap.cli.commands.conformance import backend, compare, conformance, exact_cut
from zerolap.cli.commands.demo import demo
from zerolap.cli.commands.doctor import doctor
from zerolap.cli.commands.new_adapter import new_adapter
from zerolap.cli.commands.plan import plan
from zerolap.cli.commands.trace import trace

app = typer.Typer(name="zerolap", no_args_is_help=True, pretty_exceptions_enable=False)


def _say_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"zerolap {importlib.metadata.version('zerolap')}")
        raise typer.Exit


@app.callback()
def main(
    is_version_asked: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Sharded optimizers for data-parallel training, on any accelerator."""


for command in (doctor, plan, new_adapter, trace, demo):
    app.command()(command)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(bench)

conformances = typer.Typer(name="conformance", invoke_without_command=True)
conformances.callback()(conformance)
conformances.command()(compare)
conformances.command()(backend)
conformances.command("exact-cut")(exact_cut)
app.add_typer(conformances)

checkpoints = typer.Typer(
    name="checkpoint", help="Look at sharded checkpoints, and convert them.", no_args_is_help=True
)
checkpoints.command()(inspect)
checkpoints.command()(convert)
app.add_typer(checkpoints)
