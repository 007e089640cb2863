"""The command `zerolap`. Imports neither torch nor zerolap by itself, so that it can say what is missing."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from zerolap_cli.app import app
    except ModuleNotFoundError as missing:
        sys.exit(f"zerolap: the command line needs {missing.name!r}; install it by: pip install 'zerolap[cli]'")
    app()
