"""The command `zerolap`. Imports neither torch nor zerolap by itself, so that it can say what is missing."""

from __future__ import annotations

import io
import sys


def main() -> None:
    try:
        from zerolap.cli.app import app
    except ModuleNotFoundError as missing:
        sys.exit(f"zerolap: the command line needs {missing.name!r}; install it by: pip install 'zerolap[cli]'")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # names of files need not be text, and not all terminals show all text
    app()
