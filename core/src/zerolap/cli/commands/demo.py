"""`zerolap demo`: train a small model twice on this CPU, and compare."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Annotated

import typer

from zerolap.cli.console import AsJson, exit_code, fail, fails_plainly, need
from zerolap.cli.numbers import whole_number


@fails_plainly
def demo(
    rounds: Annotated[int, typer.Option(parser=whole_number(1, 10**4), help="Rounds of a few steps with each.")] = 15,
    as_json: AsJson = False,
) -> None:
    """Train a small model on two ranks of this machine's CPU, with DDP + AdamW and with zerolap, and compare.

    Exit code 0 only if the parameters are the same, bit for bit.
    """
    need("torch")
    from zerolap.backend.registry import find_adapter

    try:
        find_adapter("cpu")
    except LookupError as error:
        raise fail(str(error)) from error
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "zerolap.cli.demo", "--rounds", str(rounds), *(["--json"] if as_json else [])]
    raise typer.Exit(exit_code(subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode))
