"""`zerolap conformance`: try every requirement of an adapter."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from zerolap.cli.console import AsJson, exit_code, fail, fails_plainly, need
from zerolap.cli.numbers import whole_number


@fails_plainly
def conformance(
    adapter: Annotated[str, typer.Option(help="The adapter under test: its name, or module:attribute that makes one.")],
    nproc: Annotated[int, typer.Option(parser=whole_number(1, 256), help="Ranks per requirement.")] = 2,
    tier: Annotated[int, typer.Option(parser=whole_number(0, 5), help="Try requirements up to this tier.")] = 3,
    report: Annotated[Path | None, typer.Option(help="Write verdict.json, verdict.html and junit.xml there.")] = None,
    only: Annotated[
        str | None, typer.Option(help="Try only requirements like this, for example COL. No verdict.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Try every requirement of an adapter on real ranks, and give a verdict.

    The same suite as `pytest --pyargs zerolap_conformance --zerolap-adapter NAME`. Exit code 0 only if the adapter conforms, 2 if
    there is no such adapter or requirement.
    """
    need("torch", "zerolap_conformance", "pytest")
    import pytest

    sys.path.insert(0, "")  # as `python -m pytest` does, so that module:attribute finds what lies here
    _check_adapter(adapter)
    if report is not None and report.exists() and not report.is_dir():
        raise fail(f"--report {report} is a file, and a folder is needed", code=2)
    if only is not None and not re.fullmatch(r"[A-Za-z0-9_ ()-]{1,200}", only):
        raise fail(f"--only is a part of a requirement's name, for example COL, got {only[:200]!r}", code=2)
    if report is not None:
        _make_folder(report)

    with tempfile.TemporaryDirectory() as temporary:
        folder = report or (Path(temporary, "report") if as_json else None)
        # No configuration but our own: the folder this is called from may have one that is meant for other tests.
        own = Path(temporary, "pytest.ini")
        own.write_text("[pytest]\n")
        options = ["-v", "-c", str(own), "--rootdir", str(Path.cwd()), "-p", "no:cacheprovider"]
        options += ["--zerolap-adapter", adapter, "--zerolap-nproc", str(nproc), "--zerolap-tier", str(tier)]
        options += ["--zerolap-report", str(folder)] if folder is not None else []
        options += ["-k", only] if only is not None else []
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            code = pytest.main([*options, "--pyargs", "zerolap_conformance"])
        if as_json and folder is not None and (folder / "verdict.json").exists():
            typer.echo((folder / "verdict.json").read_text())
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise fail(f"no requirement up to tier {tier} is like {only!r}", code=2)
    raise typer.Exit(exit_code(2 if code == pytest.ExitCode.USAGE_ERROR else int(code)))


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise fail(f"{path} cannot be made: {getattr(error, 'strerror', None) or error}", code=2) from error


def _check_adapter(named: str) -> None:
    """End with code 2 if nothing goes by this name. What is there and broken is for the verdict to say."""
    from zerolap.backend.registry import installed_adapters
    from zerolap.cli.import_path import imported

    module, is_path, name = named.partition(":")
    if is_path:
        try:
            is_there = imported(named, "--adapter") is not None
        except ValueError as error:
            raise fail(str(error), code=2) from error
        if not is_there:
            raise fail(f"--adapter {named}: there is no {name!r} in {module}", code=2)
    elif named not in installed_adapters():
        names = ", ".join(installed_adapters()) or "none"
        raise fail(
            f"no adapter {named!r}; installed: {names}. One that is not installed is given as module:attribute", code=2
        )
