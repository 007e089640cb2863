"""`zerolap checkpoint`: inspect and convert sharded checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from zerolap.cli.console import AsJson, err, fail, fails_plainly, need, out, shown
from zerolap.cli.numbers import whole_number
from zerolap.untrusted.files import printable


@fails_plainly
def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint, or a folder of them: the latest one.")],
    as_json: AsJson = False,
) -> None:
    """Say what is in a checkpoint. Exit code 1 if it is damaged."""
    need("torch")
    from zerolap.checkpoint import convert
    from zerolap.checkpoint.reader import CheckpointError

    path = _checkpoint_at(path)
    try:
        found = convert.describe(path)
    except CheckpointError as error:
        raise fail(str(error)) from error
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    out.print(
        f"step {found['step']}, saved by {found['ranks']} ranks: {found['bytes'] / 2**20:.1f} MB in {found['files']} files"
    )
    for place, group in enumerate(found["param_groups"]):
        options = ", ".join(f"{key}={value}" for key, value in group.items() if key != "params")
        out.print(f"group {place}: {group['params']} parameters; {shown(options)}")
    out.print(f"state of each parameter: {shown(', '.join(found['state_entries'])) or 'none'}")
    for param in found["parameters"]:
        out.print(f"    {shown(param['name'])} {shown(tuple(param['shape']))}")
    for name in found["buffers"]:
        out.print(f"    {shown(name)} (buffer)")


@fails_plainly
def convert(
    source: Annotated[Path, typer.Argument(help="A sharded checkpoint (or a folder of them), or a file.")],
    target: Annotated[Path, typer.Argument(help="A file, or a folder for sharded checkpoints.")],
    step: Annotated[
        int | None,
        typer.Option(
            parser=whole_number(0, 10**18 - 1), help="The step of a new sharded checkpoint, if the file does not say."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make one file of a sharded checkpoint, with the plain optimizer's state dict, or a sharded checkpoint of such a file."""
    need("torch")
    from zerolap.checkpoint import convert as converting
    from zerolap.checkpoint.reader import CheckpointError

    is_file = source.is_file()
    checkpoint = source if is_file else _checkpoint_at(source)
    if is_file and target.exists() and not target.is_dir():
        raise fail(f"{target} is a file; sharded checkpoints go to a folder", code=2)
    if not is_file and target.exists():
        raise fail(f"{target} already exists", code=2)
    if not is_file and not target.absolute().parent.is_dir():
        raise fail(f"{target} cannot be written: there is no folder {target.parent}", code=2)
    if not is_file and step is not None:
        raise fail("--step is for a file that does not say its step; a sharded checkpoint does", code=2)
    try:
        with err.status(f"converting {shown(source)} ..."):
            if is_file:
                made = converting.from_file(source, target, step=step)
            else:
                converting.to_file(checkpoint, target)
                made = target
    except (CheckpointError, OSError) as error:
        raise fail(str(error)) from error
    typer.echo(json.dumps({"written": [str(made)]}) if as_json else f"written: {printable(made)}")


def _checkpoint_at(path: Path) -> Path:
    """The checkpoint that is meant; ends with code 2 if there is none."""
    from zerolap.checkpoint.folder import find, latest

    if not path.exists():
        raise fail(f"{path} does not exist", code=2)
    if not path.is_dir():
        raise fail(f"{path} is a file; a sharded checkpoint is a folder", code=2)
    if (path / "manifest.json").exists():
        return path
    step = latest(path)
    found = find(path, step) if step is not None else None
    if found is None:
        raise fail(f"{path} has no complete checkpoint: neither manifest.json nor a folder step-N with one", code=2)
    return found
