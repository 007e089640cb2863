"""What all commands share: where they print, how they fail, and the option --json."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from zerolap.untrusted.files import printable

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead, for programs.")]


def fail(message: str, code: int = 1) -> typer.Exit:
    """Say what is wrong, and give what to raise."""
    err.print("[red]zerolap:[/red]", shown(message))
    return typer.Exit(code)


def shown(text: object) -> str:
    """Words of files, of other processes and of users, as a terminal may show them."""
    return escape(printable(text))


def fails_plainly(command: Callable[..., None]) -> Callable[..., None]:
    """Failures that a user can cause end in a sentence, never in a traceback: what the system refuses, and what was not foreseen."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
            raise
        except OSError as error:
            named = f"{error.filename}: " if error.filename is not None else ""
            raise fail(f"{named}{error.strerror or error}", code=2) from error
        except MemoryError as error:
            raise fail("this needs more memory than this process can have") from error
        except Exception as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            place = f"{Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno}" if trace else "nowhere"
            said = f"{type(error).__name__} in {place}: {error}"
            raise fail(f"unexpected {said}. Please report it, with the command and the file it was given") from error

    return run


def need(*modules: str) -> None:
    """End with what to install if one of these is not there."""
    packages = {"zerolap_conformance": "zerolap-conformance"}
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise fail(f"this needs {', '.join(missing)}; pip install {' '.join(packages.get(m, m) for m in missing)}")


def exit_code(of_process: int) -> int:
    """0, 1 and 2 mean something here; a process that was ended from outside has failed."""
    return of_process if of_process in (0, 1, 2) else 1
