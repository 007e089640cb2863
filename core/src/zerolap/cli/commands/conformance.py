"""`zerolap conformance`: try every requirement of an adapter."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from zerolap.cli.console import AsJson, exit_code, fail, fails_plainly, need
from zerolap.cli.numbers import whole_number
from zerolap.untrusted.files import printable, read_json

_LARGEST_VERDICT = 2**24


@fails_plainly
def conformance(
    context: typer.Context,
    adapter: Annotated[
        str | None, typer.Option(help="The adapter under test: its name, or module:attribute that makes one.")
    ] = None,
    nproc: Annotated[int, typer.Option(parser=whole_number(1, 256), help="Ranks per requirement.")] = 2,
    tier: Annotated[int, typer.Option(parser=whole_number(0, 5), help="Try requirements up to this tier.")] = 3,
    report: Annotated[Path | None, typer.Option(help="Write verdict.json, verdict.html and junit.xml there.")] = None,
    only: Annotated[
        str | None, typer.Option(help="Try only requirements like this, for example COL-4. That gives no verdict.")
    ] = None,
    waivers: Annotated[
        Path | None, typer.Option(help="Requirements that may fail, each with a reason and an end; a JSON file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Try every requirement of an adapter on real ranks, and give a verdict.

    The same suite as `pytest --pyargs zerolap_conformance --zerolap-adapter NAME`. Exit code 0 only if the adapter conforms, 2 if
    there is no such adapter or requirement.
    """
    if context.invoked_subcommand is not None:
        return
    need("torch", "zerolap_conformance", "pytest")
    import pytest

    if adapter is None:
        raise fail("say which adapter to try: --adapter NAME, or module:attribute that makes one", code=2)

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
        options += ["--zerolap-waivers", str(waivers.absolute())] if waivers is not None else []
        options += ["-k", only] if only is not None else []
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            code = pytest.main([*options, "--pyargs", "zerolap_conformance"])
        if as_json and folder is not None and (folder / "verdict.json").exists():
            typer.echo((folder / "verdict.json").read_text())
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise fail(f"no requirement up to tier {tier} is like {only!r}", code=2)
    raise typer.Exit(exit_code(2 if code == pytest.ExitCode.USAGE_ERROR else int(code)))


@fails_plainly
def compare(
    before: Annotated[Path, typer.Argument(help="A verdict.json.")],
    after: Annotated[Path, typer.Argument(help="A later one.")],
) -> None:
    """Compare two verdicts. Exit code 1 if anything is worse than it was, 2 if a file is no verdict."""
    need("torch", "zerolap_conformance")
    from zerolap_conformance.compare import differences

    old, new = _verdict_of(before), _verdict_of(after)
    try:
        lines, is_worse = differences(old, new)
    except (AttributeError, KeyError, TypeError) as error:
        raise fail(f"one of the two is not a verdict of schema 1: {error!r}", code=2) from error
    typer.echo("\n".join(map(printable, lines)) or "no difference")
    raise typer.Exit(int(is_worse))


@fails_plainly
def exact_cut(
    adapter: Annotated[str, typer.Option(help="The adapter: its name, or module:attribute that makes one.")],
) -> None:
    """Find the smallest `exact_cut` that holds on the adapter's device, by stepping parameters whole and in pieces."""
    need("torch", "zerolap_conformance")
    import torch

    from zerolap_conformance.cuts import smallest_cut
    from zerolap_conformance.ranks import make_adapter

    sys.path.insert(0, "")
    _check_adapter(adapter)
    made = make_adapter(adapter)
    why = made.why_unavailable()
    if why is not None:
        raise fail(f"adapter {made.name!r} cannot be used here: {why}", code=1)
    torch.set_num_threads(1)  # kernels that threads share are tried by attach
    found = smallest_cut(made.device(0))
    if found is None:
        raise fail("no cut up to 4096 elements is exact on this device", code=1)
    typer.echo(
        f"the smallest exact cut is {found}; declare exact_cut={found if found == 1 else 2 * found}"
        + ("" if found == 1 else ", twice that, for what was not tried")
    )


@fails_plainly
def backend(
    device_type: Annotated[str, typer.Option(help="As in torch.device(...).")],
    backend: Annotated[str, typer.Option(help="As in init_process_group(...).")],
    module: Annotated[
        str | None, typer.Option(help="What to import first, if that brings the device to torch.")
    ] = None,
    nproc: Annotated[int, typer.Option(parser=whole_number(1, 256), help="Ranks.")] = 2,
) -> None:
    """Try a bare backend of torch.distributed, before there is an adapter: what works, and who needs it."""
    need("torch", "zerolap_conformance")
    from zerolap_conformance.bare import try_backend

    sys.path.insert(0, "")
    found = try_backend(device_type, backend, module=module, num_ranks=nproc)
    for each in found:
        typer.echo(f"{'works' if each.error is None else 'LACKS'}  {each.what:<46} needed by {each.needed_by}")
        if each.error is not None:
            typer.echo(f"       {each.error}")
    raise typer.Exit(int(any(each.error is not None for each in found)))


def _verdict_of(path: Path) -> dict[str, Any]:
    try:
        read = read_json(path, largest=_LARGEST_VERDICT, follows_links=True)
    except (OSError, ValueError) as error:
        raise fail(f"{path} cannot be read as a verdict: {error}", code=2) from error
    if not isinstance(read, dict) or read.get("schema") != 1:
        raise fail(f"{path} is not a verdict of schema 1", code=2)
    return read


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
