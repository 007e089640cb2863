"""The commands. Each imports what it needs when it is called: help and completion need nothing but this file."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from zerolap.cli.numbers import number, whole_number
from zerolap.untrusted.files import printable

app = typer.Typer(
    name="zerolap",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
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


def _plainly(command: Callable[..., None]) -> Callable[..., None]:
    """Failures that a user can cause end in a sentence, never in a traceback: what the system refuses, and what was not foreseen."""

    @functools.wraps(command)
    def run(*given: Any, **options: Any) -> None:
        try:
            command(*given, **options)
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


@app.command()
@_plainly
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


@app.command()
@_plainly
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
    raise typer.Exit(_code(2 if code == pytest.ExitCode.USAGE_ERROR else int(code)))


def _code(of_process: int) -> int:
    """0, 1 and 2 mean something here; a process that was ended from outside has failed."""
    return of_process if of_process in (0, 1, 2) else 1


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise fail(f"{path} cannot be made: {getattr(error, 'strerror', None) or error}", code=2) from error


def _check_adapter(given: str) -> None:
    """End with code 2 if nothing goes by this name. What is there and broken is for the verdict to say."""
    from zerolap.backend.registry import installed_adapters
    from zerolap.cli.given import imported

    module, is_path, name = given.partition(":")
    if is_path:
        try:
            is_there = imported(given, "--adapter") is not None
        except ValueError as error:
            raise fail(str(error), code=2) from error
        if not is_there:
            raise fail(f"--adapter {given}: there is no {name!r} in {module}", code=2)
    elif given not in installed_adapters():
        names = ", ".join(installed_adapters()) or "none"
        raise fail(
            f"no adapter {given!r}; installed: {names}. One that is not installed is given as module:attribute", code=2
        )


@app.command()
@_plainly
def plan(
    world_size: Annotated[int, typer.Option(parser=whole_number(1, 10**6), help="Ranks.")],
    model: Annotated[
        str | None, typer.Option(help="MODULE:CALLABLE that makes the model; no memory is taken for it.")
    ] = None,
    shapes: Annotated[Path | None, typer.Option(help="A JSON list of the parameters' shapes, in their order.")] = None,
    params: Annotated[
        float | None,
        typer.Option(parser=number(0, 1e15), help="So many parameters, in a decoder's typical layers."),
    ] = None,
    bandwidth: Annotated[str | None, typer.Option(help="Of a rank's link, each way, for example 100Gbit.")] = None,
    latency: Annotated[str | None, typer.Option(help="Of an exchange of nothing, for example 10us.")] = None,
    exchange: Annotated[
        str, typer.Option(help="staged, as the CPU adapter does it, or ring, as collective libraries do.")
    ] = "staged",
    forward: Annotated[str | None, typer.Option(help="Time of forward, for example 0.12 or 120ms.")] = None,
    backward: Annotated[str | None, typer.Option(help="Time of backward.")] = None,
    flops: Annotated[str | None, typer.Option(help="Instead: operations a second reached, for example 150T.")] = None,
    tokens: Annotated[
        int | None, typer.Option(parser=whole_number(1, 10**12), help="With --flops: tokens of a rank in a step.")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="A class of torch.optim, or MODULE:CLASS.")] = "AdamW",
    optimizer_options: Annotated[str, typer.Option(help="Its options, as a JSON object.")] = "{}",
    param_dtype: Annotated[str | None, typer.Option(help="The parameters' dtype, if not the model's own.")] = None,
    master_weights: Annotated[bool, typer.Option("--master-weights", help="As in attach.")] = False,
    reduce_dtype: Annotated[str | None, typer.Option(help="As in attach.")] = None,
    gather_dtype: Annotated[str | None, typer.Option(help="As in attach.")] = None,
    bucket_cap_mb: Annotated[
        float | None, typer.Option(parser=number(0, 1e6), help="As in DDP; 25, the first 1, if not given.")
    ] = None,
    step_ns: Annotated[
        float | None, typer.Option(parser=number(0, 1e9), help="Time of the update of an element; 0.05.")
    ] = None,
    host_us: Annotated[float | None, typer.Option(parser=number(0, 1e9), help="Host time a bucket takes; 0.")] = None,
    cpu_ns_per_byte: Annotated[
        float | None, typer.Option(parser=number(0, 1e9), help="CPU time a byte takes where the CPU computes, too; 0.")
    ] = None,
    cores: Annotated[
        float | None, typer.Option(parser=number(0.1, 1e6), help="Cores of a rank that share all this; 1.")
    ] = None,
    changes_gradients: Annotated[
        bool, typer.Option("--clip", help="Gradients are clipped, unscaled or skipped before the update.")
    ] = False,
    calibrates: Annotated[
        bool, typer.Option("--calibrate", help="Measure the model on two ranks of this CPU first.")
    ] = False,
    batch: Annotated[
        str | None, typer.Option(help="With --calibrate: MODULE:CALLABLE that makes the model's arguments.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Forecast time, bytes and memory of a step for every schedule and gather, on machines that are not here.

    The code that decides in training decides here, too, in simulated time. What is given replaces what --calibrate measures.
    Exit code 2 if something is missing or cannot be, 1 if measuring failed.
    """
    need("torch")
    from zerolap.cli import plan as planning
    from zerolap.cli.given import Wanted
    from zerolap.forecast.forecast import Pattern

    try:
        if exchange not in (pattern.value for pattern in Pattern):
            raise ValueError(f"--exchange is staged or ring, got {exchange[:200]!r}")
        wanted = Wanted(
            model=model,
            shapes=shapes,
            num_params=params,
            world_size=world_size,
            bandwidth=bandwidth,
            latency=latency,
            exchange=Pattern(exchange),
            forward=forward,
            backward=backward,
            flops=flops,
            tokens=tokens,
            optimizer=optimizer,
            optimizer_options=optimizer_options,
            param_dtype=param_dtype,
            master_weights=master_weights,
            reduce_dtype=reduce_dtype,
            gather_dtype=gather_dtype,
            bucket_cap_mb=bucket_cap_mb,
            step_ns=step_ns,
            host_us=host_us,
            cpu_ns_per_byte=cpu_ns_per_byte,
            cores=cores,
            changes_gradients=changes_gradients,
            calibrates=calibrates,
            batch=batch,
        )
        planned = planning.plan(wanted, say=err.print)
    except ValueError as error:
        raise fail(str(error), code=2) from error
    except RuntimeError as error:
        raise fail(f"measuring failed: {error}") from error
    if as_json:
        typer.echo(json.dumps(planning.to_json(planned), indent=1))
    else:
        planning.show(planned, out)


@app.command()
@_plainly
def new_adapter(
    name: Annotated[str, typer.Argument(help="A short name in lower case, for example acme.")],
    device_type: Annotated[str | None, typer.Option(help="As in torch.device(...); the name if not given.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="As in init_process_group(...); the name and 'ccl' if not given.")
    ] = None,
    has_streams: Annotated[bool, typer.Option("--streams/--no-streams", help="Whether the device has streams.")] = True,
    folder: Annotated[Path | None, typer.Option(help="Where; zerolap-NAME here if not given.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write the skeleton of an adapter package for a device of your own."""
    from zerolap.cli.skeleton import write

    folder = folder or Path(f"zerolap-{name}")
    try:
        written = write(folder, name=name, device_type=device_type, backend=backend, has_streams=has_streams)
    except (ValueError, OSError) as error:
        raise fail(str(error), code=2) from error
    if as_json:
        typer.echo(json.dumps({"written": [str(path) for path in written]}))
        return
    for path in written:
        typer.echo(f"written: {printable(path)}")
    typer.echo(f"next: pip install {printable(folder.absolute())} && zerolap conformance --adapter {name}")


@app.command()
@_plainly
def trace(
    paths: Annotated[
        list[Path], typer.Argument(help="Folders that handle.trace(path=...) has written to, or files of ranks.")
    ],
    page: Annotated[Path | None, typer.Option("--out", help="Write the timeline there: one HTML page.")] = None,
    chrome: Annotated[
        Path | None, typer.Option("--chrome", help="Write a Chrome trace there, for ui.perfetto.dev.")
    ] = None,
    as_json: AsJson = False,
    is_opened: Annotated[
        bool | None,
        typer.Option(
            "--open/--no-open",
            help="Open the timeline in a browser; without --out it is written beside the traces. Done in a terminal, "
            "unless --out, --chrome or --json says where else it goes.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Say how much of the communication was hidden, and show it. Needs no torch.

    Exit code 1 if a file is no trace, or files do not belong together; 2 if there is none.
    """
    from zerolap.cli import traces

    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise fail(f"{', '.join(missing)} is not there", code=2)
    if is_opened is None:
        is_opened = sys.stdout.isatty() and page is None and chrome is None and not as_json
    if is_opened and page is None:
        page = (paths[0] if paths[0].is_dir() else paths[0].parent) / "timeline.html"
    try:
        found = traces.examine(paths)
        written = [traces.write(path, text) for path, text in found.files(page=page, chrome=chrome)]
    except (ValueError, OSError) as error:
        raise fail(str(error)) from error
    if as_json:
        typer.echo(json.dumps(found.to_json() | {"written": [str(path) for path in written]}, indent=1))
    else:
        traces.show(found, out)
        for path in written:
            out.print(f"written: {shown(path)}")
    if found.run.missing:
        few, more = found.run.missing[:20], len(found.run.missing) - 20
        said = ", ".join(map(str, few)) + (f" and {more} others" if more > 0 else "")
        err.print(f"[yellow]zerolap:[/yellow] no trace of rank {said} was given")
    if is_opened and page is not None and not traces.open_page(page):
        err.print(f"[yellow]zerolap:[/yellow] no browser could be started; open {shown(page.absolute())} yourself")


@app.command()
@_plainly
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
    raise typer.Exit(_code(subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@_plainly
def bench(context: typer.Context, as_json: AsJson = False) -> None:
    """Compare with DDP and with other sharded optimizers, by benchmarks/compare.py of the source tree.

    Takes the options of that program: `zerolap bench -- --help` lists them.
    """
    places = [folder / "benchmarks/compare.py" for folder in (Path(__file__).parents[4], Path.cwd())]
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
    raise typer.Exit(_code(code))


checkpoints = typer.Typer(
    name="checkpoint", help="Look at sharded checkpoints, and convert them.", no_args_is_help=True
)
app.add_typer(checkpoints)


@checkpoints.command()
@_plainly
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


@checkpoints.command()
@_plainly
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
        raise fail(f"{target} is there already", code=2)
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
        raise fail(f"{path} is not there", code=2)
    if not path.is_dir():
        raise fail(f"{path} is a file; a sharded checkpoint is a folder", code=2)
    if (path / "manifest.json").exists():
        return path
    step = latest(path)
    found = find(path, step) if step is not None else None
    if found is None:
        raise fail(f"{path} has no whole checkpoint: neither manifest.json nor a folder step-N with one", code=2)
    return found
