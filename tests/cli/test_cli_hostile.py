"""The command line, given what nobody should give it: a sentence and an exit code, never a traceback, in bounded time and memory."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from typer.testing import CliRunner

from support import PYTHONPATH
from support.synthetic_runs import run_of
from zerolap.checkpoint import convert
from zerolap.checkpoint.reader import digest_of
from zerolap.cli.app import app
from zerolap.observe.timeline import write
from zerolap.untrusted.files import printable, written_whole
from zerolap_conformance import bare, cuts

HOSTILE = "\x1b[2Jgone\x1b]0;owned\x07\x9b31m\u202ereversed\u2066\r\x08\ud800"  # clears, renames, colours, reorders, overwrites


def _is_clean(text: str) -> bool:
    """Whether a terminal shows this as it stands."""
    return all(c == "\n" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") for c in text)


def test_text_of_others_is_shown_without_what_moves_a_cursor() -> None:
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    for start in range(0, len(every), 1000):
        assert _is_clean(printable(every[start : start + 1000]))
    assert printable("naïve layer.0 (größe) 重み") == "naïve layer.0 (größe) 重み"
    assert len(printable("x" * 10**6)) < 3000


# --- every option of every command ------------------------------------------------------------------------------------

NASTY = ["inf", "-inf", "nan", "1e30", "1e999", "-1", "0", "", ":", "a:", ":b", ".:b", "os:", "9" * 5000, "x" * 70_000, "٣", "ä\x00b", HOSTILE, "{}", "[" * 5000, "--", "1_0", "0x10"]  # fmt: skip
LINK = ["--bandwidth", "100Gbit", "--latency", "10us"]
COMPUTE = ["--forward", "0.12", "--backward", "0.24"]
# What a command needs besides the option that is tried.
NEEDS: dict[str, list[str]] = {
    "plan": ["--world-size", "2", "--params", "1e6", *LINK, *COMPUTE],
    "--model": ["--world-size", "2", *LINK, *COMPUTE],
    "--shapes": ["--world-size", "2", *LINK, *COMPUTE],
    "--flops": ["--world-size", "2", "--params", "1e6", *LINK, "--tokens", "5"],
    "--tokens": ["--world-size", "2", "--params", "1e6", *LINK, "--flops", "1T"],
    "--batch": ["--world-size", "2", "--model", "torch.nn:Identity", *LINK, "--calibrate"],
    "conformance": ["--adapter", "cpu_gloo", "--tier", "0"],
    "compare": ["{verdict}", "{verdict}"],
    "exact-cut": ["--adapter", "cpu_gloo"],
    "backend": ["--device-type", "cpu", "--backend", "gloo"],
    "new-adapter": ["acme", "--folder", "made"],
    "trace": ["{trace}"],
    "inspect": ["{checkpoint}"],
    "convert": ["{checkpoint}", "{fresh}"],
}
# Devices by links: what takes the place of one shall be in the test's own folder.
OPENED = ["{folder}", "{zero}", "{null}", "{pipe}", "{gone}", "/dev/null/x", "{unreadable}"]


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    children = getattr(command, "commands", None)
    if children is None or (path and command.params):
        yield path, command
    if children is None:
        return
    for name, child in children.items():
        yield from _commands(child, (*path, name))


def _cases() -> Iterator[list[str]]:
    """Each parameter of each command with each value, with what the command needs besides."""
    for path, command in _commands(typer.main.get_command(app)):
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        for param in command.params:
            if getattr(param, "is_flag", False):
                continue
            needs = NEEDS.get(param.opts[0], NEEDS.get(path[-1], []))
            for value in [*NASTY, *OPENED]:
                if param.param_type_name == "argument":
                    given = needs[: len(arguments)]
                    given[arguments.index(param)] = value
                    yield [*path, *needs[len(arguments) :], "--", *given]
                else:
                    yield [*path, *needs, param.opts[0], value]
        yield [*path, "--no-such-option"]


def test_no_value_of_any_option_ends_in_a_traceback(tmp_path: Path) -> None:
    """In a process of its own, with limits. What would start other processes is not started: its options are tried here."""
    cases = list(_cases())
    assert len(cases) > 700
    assert {case[0] for case in cases} == {"doctor", "conformance", "plan", "new-adapter", "trace", "demo", "bench", "checkpoint"}  # fmt: skip
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, __file__, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, errors="replace")
    assert run.returncode == 0, run.stderr[-5000:]
    outcomes = json.loads((tmp_path / "outcomes.json").read_text())
    assert len(outcomes) == len(cases)
    for case, (code, said, seconds) in zip(cases, outcomes, strict=True):
        shown = [each[:60] for each in case]
        assert code in (0, 1, 2), (shown, code, said[-2000:])
        assert "Traceback" not in said, (shown, said[-2000:])
        assert "unexpected" not in said, (shown, said[-2000:])
        assert seconds < 30, (shown, seconds)
        if code:
            assert said.strip(), (shown, "nothing was said")


def _sweep(folder: Path) -> None:
    """What the process above runs."""
    import resource
    import signal
    import time

    resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30, 6 * 2**30))
    resource.setrlimit(resource.RLIMIT_CPU, (300, 300))
    os.chdir(folder)
    places = _places(folder)
    pytest.main = lambda *_, **__: 0  # type: ignore[assignment]
    bare.try_backend = lambda *_, **__: []
    cuts.smallest_cut = lambda *_: 1
    subprocess.run = lambda *_, **__: subprocess.CompletedProcess([], 0)  # type: ignore[assignment]

    def late(*_: object) -> None:
        raise TimeoutError("it is still at it")

    signal.signal(signal.SIGALRM, late)
    outcomes = []
    for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
        shutil.rmtree("made", ignore_errors=True)
        given = [places.get(each, each).replace("{fresh}", f"fresh{number}") for each in case]
        given += ["--no-open"] if given[0] == "trace" and "--" not in given else []
        signal.alarm(30)
        begin = time.monotonic()
        run = CliRunner().invoke(app, given)
        signal.alarm(0)
        said = run.output + (f"Traceback {run.exception!r}" if run.exception and run.exit_code not in (0, 1, 2) else "")
        if run.exception is not None and not isinstance(run.exception, SystemExit):
            said += f"Traceback {run.exception!r}"
        outcomes.append((run.exit_code, said, time.monotonic() - begin))
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


def _places(folder: Path) -> dict[str, str]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, "one.pt")
    os.mkfifo("pipe")
    Path("unreadable").symlink_to("unreadable")
    for name in ("zero", "null"):
        Path(name).symlink_to(f"/dev/{name}")
    for trace in run_of(2, 3, 2):
        write(trace, "trace")
    checkpoint = convert.from_file("one.pt", "run")
    Path("verdict").write_text(json.dumps({"schema": 1, "requirements": []}))
    names = {"verdict": "verdict", "trace": "trace", "checkpoint": str(checkpoint), "folder": "trace", "pipe": "pipe", "gone": "gone", "unreadable": "unreadable", "zero": "zero", "null": "null"}  # fmt: skip
    return {f"{{{name}}}": place for name, place in names.items()}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--params", "1e30"], "is not a number from 0 to 1e+15"),
        (["--params", "1e6", "--step-ns", "inf"], "is not a number from 0 to"),
        (["--params", "1e6", "--step-ns", "nan"], "is not a number from 0 to"),
        (["--params", "1e6", "--world-size", "1e3"], "is not a whole number from 1 to"),
        (["--params", "1e6", "--latency", "inf"], "a time is like"),
        (["--params", "1e6", "--bandwidth", "1e400Gbit"], "a bandwidth is like"),
    ],
)
def test_numbers_that_no_machine_can_do_are_refused_at_once(arguments: list[str], words: str) -> None:
    some = ["plan", "--world-size", "2", *LINK, *COMPUTE]
    run = CliRunner().invoke(app, [*some, *arguments], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"})
    assert run.exit_code == 2, (arguments, run.output)
    assert words in re.sub(r"[\s│]+", " ", run.output), (arguments, run.output)


def test_a_large_plan_is_made_in_seconds() -> None:
    run = CliRunner().invoke(app, ["plan", "--world-size", "1000000", "--params", "1e13", *LINK, *COMPUTE, "--json"])
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["num_params"] > 9e12


# --- hostile files ----------------------------------------------------------------------------------------------------


def _checked(*arguments: str, codes: tuple[int, ...] = (1, 2)) -> str:
    run = CliRunner().invoke(app, list(arguments))
    assert run.exception is None or isinstance(run.exception, SystemExit), (arguments, run.exception)
    assert run.exit_code in codes, (arguments, run.output)
    assert _is_clean(run.output), repr(run.output)
    assert "unexpected" not in run.output, run.output
    return run.output


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    names = [f"layer{HOSTILE[:-1]}.weight", "[red]markup[/red]"]
    torch.save(
        {
            "model": {names[0]: torch.zeros(2, 3), names[1]: torch.zeros(3), f"buffer{HOSTILE[:-1]}": torch.tensor(1)},
            "optimizer": {
                "state": {0: {f"moment{HOSTILE[:-1]}": torch.zeros(2, 3)}},
                "param_groups": [{"lr": 0.1, f"option{HOSTILE[:-1]}": HOSTILE[:-1], "params": [0, 1], "param_names": names}],
            },
            "step": 3,
        },
        tmp_path / "one.pt",
    )  # fmt: skip
    return convert.from_file(tmp_path / "one.pt", tmp_path / "run")


def test_what_a_checkpoint_says_cannot_move_the_cursor(checkpoint: Path, tmp_path: Path) -> None:
    said = _checked("checkpoint", "inspect", str(checkpoint), codes=(0,))
    assert r"\x1b[2Jgone" in said
    assert "[red]markup[/red]" in said
    _checked("checkpoint", "inspect", str(checkpoint), "--json", codes=(0,))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for changes in ({"format": HOSTILE}, {"files": {**manifest["files"], HOSTILE: [1, "0" * 128]}}):
        (checkpoint / "manifest.json").write_text(json.dumps(manifest | changes))
        _checked("checkpoint", "inspect", str(checkpoint))
        _checked("checkpoint", "convert", str(checkpoint), str(tmp_path / "out.pt"))
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    for name in (HOSTILE[:-1], "os"):
        (checkpoint / ".metadata").write_bytes(b"\x80\x04" + pickle.dumps(name)[2:-1] + b"\x8c\x04\x1b[2J\x93.")
        manifest["files"][".metadata"] = digest_of(checkpoint / ".metadata")
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
        _checked("checkpoint", "inspect", str(checkpoint))


def test_files_that_are_no_checkpoints_end_in_a_sentence(tmp_path: Path) -> None:
    seed = random.Random(26)
    contents = [b"", b"PK\x03\x04", bytes(1000), seed.randbytes(1000), pickle.dumps({"model": 1}), b"[" * 10**6]
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.pt").write_bytes(content)
        _checked("checkpoint", "convert", str(tmp_path / f"{number}.pt"), str(tmp_path / "out"))
        folder = tmp_path / f"step-{number:09d}"
        folder.mkdir()
        (folder / "manifest.json").write_bytes(content)
        _checked("checkpoint", "inspect", str(folder))
    assert not (tmp_path / "out").exists()


TRACES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a host": lambda content: content["clock"].update(host=HOSTILE),
    "what is said of it": lambda content: content["about"].update(schedule=HOSTILE, device=HOSTILE),
    "a run": lambda content: content.update(run=HOSTILE),
    "a name of a span": lambda content: content["spans"].append(["blocked", None, 0, 10**6, 1, HOSTILE]),
    "a name of what was waited for": lambda content: content["spans"].append(["wait", 0, 0, 10**6, 1, '"><script>']),
    "no bucket": lambda content: content["spans"].extend([["use", None, 0, 10**6, 1, "x"], ["wait", None, 0, 9, 1, "reduce"], ["blocked", None, 0, 10**6, 1, None]]),
    "a bucket that is none": lambda content: content["spans"].append(["reduce", 10**5, 0, 1, 1, None]),
    "a kind": lambda content: content["spans"].append([HOSTILE, 0, 0, 1, 1, None]),
    "a kind that is none": lambda content: content["spans"].append([["x"], 0, 0, 1, 1, None]),
    "a moment of text": lambda content: content["spans"].append(["reduce", 0, "0", "1", 1, None]),
    "a late moment": lambda content: content["spans"].append(["reduce", 0, 0, 10**400, 1, None]),
    "an endless moment": lambda content: content["spans"].append(["reduce", 0, 0, 1e308 * 10, 1, None]),
    "truth for a number": lambda content: content["spans"].append(["reduce", True, 0, 1, 1, None]),
    "an update of text": lambda content: content["spans"].append(["step", 0, 0, 1, "x", None]),
    "a negative update": lambda content: content["spans"].append(["step", 0, 0, 1, -5, None]),
    "spans that are an object": lambda content: content.update(spans={}),
    "a span that is a number": lambda content: content.update(spans=[3]),
    "ranks that are text": lambda content: content.update(ranks="01"),
    "many ranks": lambda content: content.update(ranks=list(range(10**6))),
    "a rank twice": lambda content: content.update(ranks=[0, 0, 1]),
    "a rank of text": lambda content: content.update(rank="0"),
    "a rank that is huge": lambda content: content.update(rank=10**30, ranks=[10**30]),
    "seconds that are none": lambda content: content.update(seconds=None),
    "negative seconds": lambda content: content.update(seconds=-1),
    "a clock that is none": lambda content: content.update(clock=[]),
    "a clock of text": lambda content: content["clock"].update(begin="x"),
    "buckets of text": lambda content: content.update(buckets="x"),
    "a bucket of text": lambda content: content.update(buckets=["x"]),
    "a parameter's name": lambda content: content.update(buckets=[{"num_bytes": 1, "params": [HOSTILE], "is_shared": True}]),
    "a negative size": lambda content: content.update(buckets=[{"num_bytes": -1, "params": [], "is_shared": True}]),
    "about nothing": lambda content: content.update(about=None),
    "a schema of text": lambda content: content.update(zerolap_trace=HOSTILE),
    "no object": lambda content: content.clear(),
}  # fmt: skip


@pytest.mark.parametrize("case", TRACES)
def test_a_trace_that_was_changed_is_refused_or_shown_harmlessly(case: str, tmp_path: Path) -> None:
    for trace in run_of(2, 3, 2):
        write(trace, tmp_path)
    for path in sorted(tmp_path.glob("rank*.json"))[: None if "host" in case or "run" in case else 1]:
        content = json.loads(path.read_text())
        TRACES[case](content)
        path.write_text(json.dumps(content))
    out, chrome = tmp_path / "page.html", tmp_path / "chrome.json"
    _checked("trace", str(tmp_path), "--out", str(out), "--chrome", str(chrome), codes=(0, 1))
    _checked("trace", str(tmp_path), "--json", codes=(0, 1))
    if out.exists():
        assert _is_clean(out.read_text().replace("\t", " "))
        assert '<script>">' not in out.read_text()
        assert '"><script>' not in out.read_text()
        json.loads(chrome.read_text())


@pytest.fixture
def no_traces(tmp_path: Path) -> Path:
    """A folder of what may stand where a trace is looked for."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 2**40)
    (tmp_path / "text").write_text(HOSTILE, errors="surrogatepass")
    (tmp_path / "deep").write_text("[" * 10**6)
    (tmp_path / "deeper").write_text('{"a":' * 10**6)
    (tmp_path / "twice").write_text('{"zerolap_trace": 1, "zerolap_trace": 1}')
    (tmp_path / "nan").write_text('{"zerolap_trace": NaN}')
    (tmp_path / HOSTILE[:9]).write_text("{}")
    (tmp_path / "folder" / "rank0.json").mkdir(parents=True)
    for name in ("zero", "null"):
        (tmp_path / name).symlink_to(f"/dev/{name}")
    return tmp_path


@pytest.mark.parametrize(
    "name",
    ["pipe", "huge", "text", "deep", "deeper", "twice", "nan", HOSTILE[:9], "folder", "zero", "null", "/proc/self/mem"],
)
def test_a_file_that_is_no_trace_ends_in_a_sentence(no_traces: Path, name: str) -> None:
    assert os.path.lexists(no_traces / name)
    _checked("trace", str(no_traces / name))


@pytest.mark.parametrize("name", ["pipe", "folder", "null", "to-pipe"])
def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path, name: str) -> None:
    for trace in run_of(2, 3, 2):
        write(trace, tmp_path / "run")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "null").symlink_to("/dev/null")
    (tmp_path / "to-pipe").symlink_to("pipe")
    before = os.lstat(tmp_path / name)
    for option in ("--chrome", "--out"):
        said = _checked("trace", str(tmp_path / "run"), "--no-open", option, str(tmp_path / name), codes=(1, 2))
        assert "cannot be written" in said
    with pytest.raises(OSError, match="is not a regular file"), written_whole(tmp_path / name):
        pass
    assert (os.lstat(tmp_path / name).st_ino, os.lstat(tmp_path / name).st_mode) == (before.st_ino, before.st_mode)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "null", "pipe", "run", "to-pipe"]


def test_what_could_not_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("old")
    with pytest.raises(TypeError), written_whole(tmp_path / "old.json") as stream:
        stream.write("no bytes")  # type: ignore[arg-type]
    assert (tmp_path / "old.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]


def test_many_spans_at_once_take_no_longer_than_their_number(tmp_path: Path) -> None:
    for trace in run_of(2, 3, 2):
        write(trace, tmp_path)
    path = tmp_path / "rank0.json"
    content = json.loads(path.read_text())
    content["spans"] += [["reduce", 0, number, 10**6, 1, None] for number in range(5000)]
    path.write_text(json.dumps(content))
    _checked("trace", str(tmp_path), "--chrome", str(tmp_path / "chrome.json"), codes=(0,))


if __name__ == "__main__":
    _sweep(Path(sys.argv[1]))
