"""The folder of checkpoints: a process may be killed at every call to the file system, and what is another's stays."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from zerolap.checkpoint import folder as folder_module
from zerolap.checkpoint.contents import pack
from zerolap.checkpoint.folder import Writer, find, latest, path_of, place, remove_all_but, steps, sweep
from zerolap.checkpoint.reader import CheckpointError, CheckpointReader
from zerolap.checkpoint.writer import Target, write_state
from zerolap_conformance.ranks import _SERVER

# How a save has ended: beyond its last call, with a call that failed and did not matter, or not.
OVER, DONE, ENDED = 0, 8, 9
CALLS = ("rename", "replace", "unlink", "rmdir", "mkdir", "symlink", "open", "fsync", "remove")


# --- kills ------------------------------------------------------------------------------------------------------------


def _state(value: int) -> dict[str, Any]:
    """A checkpoint whose every number is ``value``, as large as it takes to have several entries."""
    return {
        "model": {f"layer{n}": torch.full((50,), float(value)) for n in range(3)},
        "extra": pack({"value": value}),
    }


def _value_of(path: Path) -> set[float]:
    """All numbers of a checkpoint, read as ``load`` reads it: digests and all."""
    reader = CheckpointReader(path)
    found = reader.read({"model": {f"layer{n}": torch.empty(50) for n in range(3)}})
    return {float(value) for each in found["model"].values() for value in each.unique()}


def _die_at(number: int, *, with_error: bool) -> list[int]:
    """End this process, as SIGKILL does, before its call of this number to the file system; or let that call fail. Returns how many
    calls are left until then."""
    left = [number]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                if with_error:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os._exit(ENDED)
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    folder_module._exchange_names = counted(folder_module._exchange_names)
    return left


def _kill_everywhere(folder: str, can_exchange: bool, with_error: bool, connection: Any) -> None:
    """Overwrite step 2 of three, with keep=2, and be killed at every point of it; then again, on top of what that has left."""
    torch.set_num_threads(1)
    if not can_exchange:
        folder_module._exchange_names = lambda one, other: False
    said: list[tuple[int, int, list[int], int | None, set[float], bool]] = []
    before, number = Path(folder, "before"), 0
    for step in (1, 2, 3):
        write_state(Target(folder=before, step=step), _state(step), None)
    while True:
        run = Path(folder, str(number))
        shutil.copytree(before, run, symlinks=True)
        codes = []
        for again in (number, number // 2):
            child = os.fork()
            if child == 0:
                left_of = _die_at(again, with_error=with_error)
                try:
                    write_state(Target(folder=run, step=2, keep=2, overwrite=True), _state(20), None)
                except CheckpointError:
                    os._exit(ENDED)
                os._exit(OVER if left_of[0] >= 0 else DONE)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            there = find(run, 2)
            values = _value_of(there) if there is not None else set()
            said.append((number, codes[-1], steps(run), latest(run), values, (run / "latest").exists()))
        write_state(Target(folder=run, step=2, overwrite=True), _state(21), None)
        left = [name for name in os.listdir(run) if name.endswith((".partial", ".replaced"))]
        said.append((number, -1, left, latest(run), _value_of(path_of(run, 2)), (run / "latest").exists()))  # type: ignore[arg-type]
        shutil.rmtree(run)
        if codes[0] == OVER:
            break
        number += 1
    connection.send(said)


@pytest.mark.parametrize("can_exchange", [True, False], ids=["names are exchanged", "names cannot be exchanged"])
@pytest.mark.parametrize("with_error", [False, True], ids=["kill", "error"])
def test_a_kill_or_error_at_any_call_while_overwriting_leaves_the_old_or_the_new(
    tmp_path: Path, can_exchange: bool, with_error: bool
) -> None:
    ours, theirs = _SERVER.Pipe(duplex=False)
    process = _SERVER.Process(
        target=_kill_everywhere, args=(str(tmp_path), can_exchange, with_error, theirs), daemon=True
    )
    process.start()
    theirs.close()
    try:
        assert ours.poll(120), "not done within 120 s"
        said = ours.recv()
    finally:
        process.kill()
        process.join()
    kills = [line for line in said if line[1] == ENDED]
    assert len(kills) > 20, "too few points to say anything"
    for number, code, held, newest, values, _ in said:
        if code == -1:
            assert held == [], f"killed at {number}: the next save has left {held}"
            assert (newest, values) == (2, {21.0}), number
            continue
        assert code in (OVER, DONE, ENDED), number
        assert values in ({2.0}, {20.0}), f"killed at {number}: step 2 is {values}"
        assert {2, 3} <= set(held), f"killed at {number}: {held}"
        assert newest == (2 if values == {20.0} else 3), f"killed at {number}: the latest is {newest}, step 2 {values}"
    assert {frozenset(values) for _, _, _, _, values, _ in kills} == {
        frozenset({2.0}),
        frozenset({20.0}),
    }


# --- what others have left, or are writing ----------------------------------------------------------------------------


def _leftover(folder: Path, writer: Writer, name: str = "step-000000007") -> Path:
    made = folder / writer.name_for(name)
    made.mkdir(parents=True)
    (made / "__0_0.distcp").write_bytes(b"x")
    return made


def _another(**changes: Any) -> Writer:
    here = Writer.here(limit=60)
    return Writer(**{"host": here.host, "pid": here.pid, "started": here.started, "limit": here.limit, **changes})


def test_only_what_is_surely_of_a_process_that_is_gone_is_swept(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    alive = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    try:
        while folder_module._process(zombie.pid)[0] != "Z":  # type: ignore[index]
            time.sleep(0.01)
        started = {process: (folder_module._process(process.pid) or ("", 0))[1] for process in (alive, zombie)}
        old = time.time() - 2 * 60 - 601
        gone = {
            "ended": _leftover(tmp_path, _another(pid=ended.pid, started=1)),
            "a zombie": _leftover(tmp_path, _another(pid=zombie.pid, started=started[zombie])),
            "its number is another's now": _leftover(tmp_path, _another(pid=alive.pid, started=started[alive] + 1)),
            "elsewhere, and long silent": _leftover(tmp_path, _another(host="a" * 12)),
            "a link": tmp_path / _another(pid=ended.pid).name_for("latest"),
        }
        gone["a link"].symlink_to("step-000000007")
        for path in (gone["elsewhere, and long silent"] / "__0_0.distcp", gone["elsewhere, and long silent"]):
            os.utime(path, (old, old))
        stays = {
            "ours": _leftover(tmp_path, _another()),
            "alive": _leftover(tmp_path, _another(pid=alive.pid, started=started[alive])),
            "elsewhere": _leftover(tmp_path, _another(host="b" * 12)),
            "elsewhere, and one file is new": _leftover(tmp_path, _another(host="c" * 12)),
            "of a host that is not known": _leftover(
                tmp_path, _another(host=folder_module._UNKNOWN_HOST, pid=ended.pid)
            ),
            "a number that is none": _leftover(tmp_path, _another(pid=10**30)),
        }
        os.utime(stays["elsewhere, and one file is new"], (old, old))
        for name in ("mine.partial", "step-000000007.partial", f"step-7.{'0' * 12}-1-1-1-x.partial"):
            stays[name] = tmp_path / name
            stays[name].mkdir()
        sweep(tmp_path, now=time.time(), writer=_another())
        for what, path in gone.items():
            assert not os.path.lexists(path), what
        for what, path in stays.items():
            assert path.exists(), what
    finally:
        alive.kill()
        alive.wait()
        zombie.wait()


# --- order ------------------------------------------------------------------------------------------------------------


def _made(folder: Path, step: int, written: Any = None, *, text: str | None = None) -> Path:
    """Something that has a checkpoint's name and manifest, and nothing else."""
    path = path_of(folder, step)
    path.mkdir(parents=True)
    manifest = {"step": step} if written is None else {"step": step, "written_ns": written}
    (path / "manifest.json").write_text(json.dumps(manifest) if text is None else text)
    return path


def test_the_order_is_that_of_writing_and_unreadable_ones_are_neither_passed_over_nor_removed(tmp_path: Path) -> None:
    writer = _another()
    for step, written in ((5, 300), (50, 200), (9, 100), (7, None), (8, "nonsense"), (6, [1])):
        _made(tmp_path, step, written)
    assert steps(tmp_path) == [5, 6, 7, 8, 9, 50]
    assert latest(tmp_path) == 8, "the newest of those that do not say when: loading it says that it is damaged"
    for step in (8, 6):
        shutil.rmtree(path_of(tmp_path, step))
    assert latest(tmp_path) == 5
    for step, text in ((60, "{"), (61, ""), (62, "[" * 100_000), (63, "[]")):
        _made(tmp_path, step, text=text)
    remove_all_but(tmp_path, keep=2, newest=9, writer=writer)
    assert steps(tmp_path) == [5, 9, 60, 61, 62, 63]


def test_a_manifest_that_would_block_is_not_waited_for(tmp_path: Path) -> None:
    _made(tmp_path, 1, 5)
    blocking = path_of(tmp_path, 2)
    blocking.mkdir()
    os.mkfifo(blocking / "manifest.json")
    linked = path_of(tmp_path, 3)
    linked.mkdir()
    (linked / "manifest.json").symlink_to(blocking / "manifest.json")
    assert (steps(tmp_path), latest(tmp_path)) == ([1], 1)


def test_a_clock_that_goes_back_does_not_change_the_order(tmp_path: Path) -> None:
    future = time.time_ns() + 10**18
    _made(tmp_path, 1, future)
    assert folder_module.next_written_ns(tmp_path) == future + 1


def test_a_job_that_is_faster_is_not_overwritten(tmp_path: Path) -> None:
    _made(tmp_path, 4, 1)
    (path_of(tmp_path, 4) / "mark").write_text("theirs")
    partial = tmp_path / _another().name_for("step-000000004")
    partial.mkdir()
    with pytest.raises(FileExistsError, match="by another job meanwhile"):
        place(partial, path_of(tmp_path, 4), writer=_another(), overwrite=False)
    assert (path_of(tmp_path, 4) / "mark").read_text() == "theirs"
    assert partial.exists()


def test_names_of_what_is_partial_are_never_used_twice() -> None:
    names = {_another().name_for("step-000000004") for _ in range(100)}
    assert len(names) == 100
    assert all(Writer.of(name) == _another() for name in names)
    assert Writer.of(f"step-000000004.{secrets.token_hex(6)}.partial") is None
