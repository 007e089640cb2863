"""Saving: one meaning of "latest", errors that are ours and harm no later save, waits that end, arguments that are checked first."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import zerolap
from support import ROOT
from support.checkpoints import ADAMW, SECONDS, assert_same, make, short_of_patience, snapshot, train
from support.ranks import on_ranks
from support.training import Mlp
from zerolap import checkpoint
from zerolap.checkpoint import convert
from zerolap.checkpoint.folder import path_of
from zerolap.checkpoint.reader import CheckpointError
from zerolap.checkpoint.save_sharded import _groups
from zerolap.cli.app import app
from zerolap_conformance.ranks import run_ranks

# --- the latest -------------------------------------------------------------------------------------------------------


def _link(folder: str, target: str) -> None:
    link = Path(folder, "latest")
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    dist.barrier()


def _roll_back(folder: str) -> dict[str, Any]:
    ddp, zero = make({"overlap": "none"})
    for step in (100, 200, 300):
        checkpoint.save(folder, ddp, zero, step=step)
    checkpoint.load(folder, ddp, zero, step=100)
    checkpoint.save(folder, ddp, zero, step=120)
    said: dict[str, Any] = {
        "after a rollback": (checkpoint.load(folder, ddp, zero).step, os.readlink(f"{folder}/latest"))
    }
    for what, target in (
        ("dangling", "step-000000999"),
        ("outside", "/etc"),
        ("of another folder", f"{folder}/../other/step-000000200"),
        ("no name of ours", "step-200"),
    ):
        _link(folder, target)
        said[what] = checkpoint.load(folder, ddp, zero).step
    for what, target in (("by hand", "step-000000200"), ("by hand, absolute", f"{folder}/step-000000200")):
        _link(folder, target)
        said[what] = checkpoint.load(folder, ddp, zero).step
    Path(folder, "latest").unlink()
    said["missing"] = checkpoint.load(folder, ddp, zero).step
    Path(folder, "latest").mkdir()  # as a copy that follows links makes it
    said["a folder"] = checkpoint.load(folder, ddp, zero).step
    checkpoint.save(folder, ddp, zero, step=121)
    Path(folder, "latest").rmdir()
    checkpoint.async_save(folder, ddp, zero, step=110, keep=2).wait()
    said["kept"] = (checkpoint.steps(folder), checkpoint.load(folder, ddp, zero).step, os.readlink(f"{folder}/latest"))
    return said


def test_the_latest_is_the_one_written_last_for_load_link_and_keep(tmp_path: Path) -> None:
    (tmp_path / "other" / "step-000000200").mkdir(parents=True)
    (said,) = run_ranks(1, _roll_back, str(tmp_path / "run"))
    shown = CliRunner().invoke(app, ["checkpoint", "inspect", str(tmp_path / "run"), "--json"])
    assert json.loads(shown.stdout)["step"] == 110, "the command line means the same"
    assert said == {
        "after a rollback": (120, "step-000000120"),
        "dangling": 120,
        "outside": 120,
        "of another folder": 120,
        "no name of ours": 120,
        "by hand": 200,
        "by hand, absolute": 200,
        "missing": 120,
        "a folder": 120,
        "kept": ([110, 121], 110, "step-000000110"),
    }


@on_ranks(2)
def test_keep_never_removes_what_was_just_written(tmp_path: Path) -> None:
    folder = str(tmp_path)
    ddp, zero = make({"overlap": "none"})
    for step in (100, 200, 300):
        checkpoint.save(folder, ddp, zero, step=step, keep=3)
    checkpoint.load(folder, ddp, zero, step=100)
    checkpoint.save(folder, ddp, zero, step=120, keep=2)
    assert checkpoint.steps(folder) == [120, 300]
    assert checkpoint.load(folder, ddp, zero).step == 120
    assert os.readlink(f"{folder}/latest") == "step-000000120"


@on_ranks(1)
def test_checkpoints_of_older_versions_are_ordered_by_step(tmp_path: Path) -> None:
    """Manifests of a version that did not say when they were written: older than all that do, and ordered by their steps."""
    folder = str(tmp_path)
    ddp, zero = make({"overlap": "none"})
    for step in (3, 20, 10):
        checkpoint.save(folder, ddp, zero, step=step)
        file = Path(folder, f"step-{step:09d}", "manifest.json")
        manifest = json.loads(file.read_text())
        manifest.pop("written_ns", None)
        file.write_text(json.dumps(manifest))
    Path(folder, "latest").unlink()
    newest = checkpoint.load(folder, ddp, zero).step
    checkpoint.save(folder, ddp, zero, step=5, keep=2)
    assert newest == 20, newest
    assert checkpoint.steps(folder) == [5, 20]


# --- arguments --------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_odd_steps_and_keeps_are_refused_on_all_ranks_before_anything_is_written(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    ddp, zero = make({"overlap": "none"})
    said = {}
    cases: dict[str, dict[str, Any]] = {
        "negative": {"step": -1},
        "bool": {"step": True},
        "numpy bool": {"step": np.bool_(True)},
        "float": {"step": 3.0},
        "text": {"step": "3"},
        "huge": {"step": 10**30},
        "keep 0": {"step": 1, "keep": 0},
        "keep negative": {"step": 1, "keep": np.int64(-2)},
        "keep True": {"step": 1, "keep": True},
        "keep 1.5": {"step": 1, "keep": 1.5},
        "ranks differ": {"step": 1 + dist.get_rank()},
        "one rank is wrong": {"step": [1, -1][dist.get_rank()]},
    }
    for name, options in cases.items():
        for save in (checkpoint.save, checkpoint.async_save):
            try:
                save(folder, ddp, zero, **options)
                said[name] = "nothing"
            except (ValueError, TypeError, zerolap.ZerolapError) as error:
                said[name] = f"{type(error).__name__}: {error}"
            assert not Path(folder).exists(), name
    for index, (step, keep) in enumerate(
        ((np.int64(3), np.int64(2)), (np.uint8(4), np.int32(2)), (torch.tensor(9), 2))
    ):
        saved = checkpoint.save(folder, ddp, zero, step=step, keep=keep)
        assert saved.name == f"step-{(3, 4, 9)[index]:09d}"
    assert checkpoint.load(folder, ddp, zero, step=np.int64(4)).step == 4
    with pytest.raises((TypeError, zerolap.ZerolapError), match="whole number"):
        checkpoint.load(folder, ddp, zero, step=True if dist.get_rank() else 4)
    assert checkpoint.steps(folder) == [4, 9]
    for name, message in said.items():
        assert message.startswith(("ValueError", "TypeError", "CheckpointError")), (name, message)


# --- what is the user's, and what another job's -----------------------------------------------------------------------


@on_ranks(2)
def test_what_is_the_users_neither_breaks_a_save_nor_goes(tmp_path: Path) -> None:
    folder = str(tmp_path)
    theirs = {
        "notes.partial": b"mine",
        "step-000000001.partial/data": b"mine",
        "latest.partial": b"mine",
        "step-000000002-old.partial": b"mine",
        "step-9/manifest.json": b"{}",
        "step-9/data": b"mine",
        "step-٠٠٠٠٠٠٠٠٩/manifest.json": b"{}",
    }
    if dist.get_rank() == 0:
        for name, data in theirs.items():
            file = Path(folder, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
    dist.barrier()
    ddp, zero = make({"overlap": "none"})
    for step in (1, 2, 9):
        checkpoint.save(folder, ddp, zero, step=step, keep=1)
    checkpoint.save(folder, ddp, zero, step=9, keep=1, overwrite=True)
    for name, data in theirs.items():
        assert Path(folder, name).read_bytes() == data, name
    assert checkpoint.steps(folder) == [9]
    assert checkpoint.load(folder, ddp, zero).step == 9
    ours = sorted(set(os.listdir(folder)) - {name.split("/")[0] for name in theirs})
    assert ours == ["latest", "step-000000009"], ours


class _Constant(Mlp):
    """Every number in it says whose it is."""


def _mark(ddp: Any, value: float) -> None:
    with torch.no_grad():
        for param in ddp.parameters():
            param.fill_(value)


def _two_jobs(folder: str, num_saves: int) -> list[str]:
    """Two jobs of two ranks each, in one process group of four: each has a group of its own, and knows nothing of the other."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    job = rank // 2
    model = _Constant()
    zero = zerolap.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, groups[job], **ADAMW)
    said = []
    for step in range(num_saves):
        _mark(model, 1000 * job + step)
        try:
            checkpoint.save(
                folder, model, zero, step=step % 3, overwrite=True, keep=2, extra={"job": job, "step": step}
            )
        except CheckpointError as error:
            said.append(str(error))
        try:
            loaded = checkpoint.load(folder, model, zero)
        except (CheckpointError, FileNotFoundError):  # replaced, or removed by the other job's keep=, meanwhile
            continue
        values = {float(value) for param in model.parameters() for value in param.unique()}
        expected = 1000 * loaded.extra["job"] + loaded.extra["step"]
        assert values == {expected}, f"a mixture: {values}, not {expected}"
    return said


def test_two_jobs_in_one_folder_never_mix_their_files(tmp_path: Path) -> None:
    for said in run_ranks(4, _two_jobs, str(tmp_path), 8):
        assert said == [], "a save of one job was disturbed by the other"
    for step in checkpoint.steps(tmp_path):
        convert.to_file(path_of(tmp_path, step), tmp_path / f"{step}.pt")
        whole = torch.load(tmp_path / f"{step}.pt", weights_only=True)
        values = {float(value) for param in whole["model"].values() for value in param.unique()}
        assert values == {1000 * whole["extra"]["job"] + whole["extra"]["step"]}
    assert not list(tmp_path.glob("*.partial"))


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "failing"), [("ENOSPC", [1]), ("EIO", [0, 1]), ("EROFS", [0])])
@on_ranks(2)
def test_a_failed_save_is_our_error_on_all_ranks_and_the_next_one_works(
    tmp_path: Path, error: str, failing: list[int]
) -> None:
    """Saves that fail on some ranks, and one after each that must not."""
    from torch.distributed.checkpoint import filesystem

    folder = str(tmp_path)
    ddp, zero = make({"overlap": "none"})
    train(ddp, zero, 0, 1)
    checkpoint.save(folder, ddp, zero, step=0)
    fsync, said, step = os.fsync, [], 0

    def broken(descriptor: int) -> None:
        if dist.get_rank() in failing:
            raise OSError(getattr(errno, error), os.strerror(getattr(errno, error)))
        fsync(descriptor)

    def attempt(how: Callable[[], Any], what: str) -> None:
        filesystem.os.fsync = broken  # type: ignore[attr-defined]
        try:
            how()
            said.append(f"{what}: nothing")
        except Exception as caught:
            said.append(f"{what}: {type(caught).__name__}: {caught}")
        finally:
            filesystem.os.fsync = fsync  # type: ignore[attr-defined]

    for what, how in (
        ("save", lambda step: checkpoint.save(folder, ddp, zero, step=step)),
        ("async_save", lambda step: checkpoint.async_save(folder, ddp, zero, step=step).wait()),
    ):
        step += 1
        attempt(lambda how=how, step=step: how(step), what)
        dist.barrier()  # the first rank cleans up behind its error
        assert checkpoint.steps(folder) == list(range(step)), "what failed is not there, and harms nothing"
        assert not list(Path(folder).glob("*.partial")), "a full disk is not kept full"
        assert how(step) == path_of(folder, step), "the next save, of the same step, works"
    assert checkpoint.load(folder, ddp, zero).step == step
    for line in said:
        assert "CheckpointError: " in line, line
        assert os.strerror(getattr(errno, error)) in line, line
        assert f"rank {failing[0]}: " in line, line


@on_ranks(2)
def test_files_that_the_system_cuts_short_are_an_error(tmp_path: Path) -> None:
    """By a limit on the size of files: as real as a full disk."""
    import resource

    folder = str(tmp_path)
    ddp, zero = make({"overlap": "none"})
    train(ddp, zero, 0, 1)
    said = []
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    for save in (checkpoint.save, lambda *args, **kwargs: checkpoint.async_save(*args, **kwargs).wait()):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            save(folder, ddp, zero, step=1)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        dist.barrier()
        assert os.listdir(folder) == []
    checkpoint.save(folder, ddp, zero, step=1)
    assert checkpoint.load(folder, ddp, zero).step == 1
    assert len(said) == 2, said
    assert all(line.startswith("CheckpointError: ") and "could not be written" in line for line in said), said


@on_ranks(2)
def test_an_error_that_was_not_seen_is_a_warning_of_the_next_save_which_is_made(tmp_path: Path) -> None:
    folder = str(tmp_path)
    ddp, zero = make({"overlap": "none"})
    blocker = Path(folder, "file")
    if dist.get_rank() == 0:
        blocker.write_text("in the way")
    dist.barrier()
    checkpoint.async_save(blocker, ddp, zero, step=1)  # and nobody waits for it
    with pytest.warns(UserWarning, match="wait\\(\\) was not called") as caught:
        checkpoint.save(Path(folder, "good"), ddp, zero, step=2)
    seen = checkpoint.async_save(blocker, ddp, zero, step=3)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="could not be written"):
            seen.wait()
    assert seen.is_done()
    checkpoint.async_save(Path(folder, "good"), ddp, zero, step=4).wait()  # a warning would be an error here
    said, steps = str(caught[0].message), checkpoint.steps(Path(folder, "good"))
    assert "step-000000001 could not be written" in said, said
    assert steps == [2, 4], steps


def _interrupted(folder: str, kind: str) -> str:
    from torch.distributed.checkpoint import filesystem

    ddp, zero = make({"overlap": "none"})
    fsync = os.fsync

    def stopped(descriptor: int) -> None:
        raise {"KeyboardInterrupt": KeyboardInterrupt, "SystemExit": SystemExit}[kind]

    if dist.get_rank() == 1:
        filesystem.os.fsync = stopped  # type: ignore[attr-defined]
    try:
        checkpoint.save(folder, ddp, zero, step=1)
        return "nothing"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    finally:
        filesystem.os.fsync = fsync  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "SystemExit"])
def test_what_ends_the_process_is_not_swallowed(tmp_path: Path, kind: str) -> None:
    first, second = run_ranks(2, _interrupted, str(tmp_path), kind)
    assert second.startswith(kind)
    assert first.startswith("CheckpointError: ")
    assert kind in first


# --- waits ------------------------------------------------------------------------------------------------------------


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, "not within 60 s"
        time.sleep(0.01)


STOPPED = """
import os, sys, time, datetime, signal, torch, torch.distributed as dist
sys.path.insert(0, {tests!r})
from support.checkpoints import short_of_patience
from torch.distributed.checkpoint import filesystem
from zerolap import checkpoint
rank = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://{store}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
_, model, zero = short_of_patience({folder!r})
if rank == 1:
    filesystem.os.fsync = lambda file: os.kill(os.getpid(), signal.SIGSTOP)  # the other one then waits for us
start = time.monotonic()
saving = checkpoint.async_save({folder!r}, model, zero, step=3)
try:
    saving.wait()
    print("written")
except Exception as error:
    print(f"{{time.monotonic() - start:.1f}} {{type(error).__name__}}: {{error}}", flush=True)
print(checkpoint.steps({folder!r}), flush=True)
os._exit(0)
"""


def test_a_rank_that_is_stopped_ends_the_wait_within_the_groups_timeout(tmp_path: Path) -> None:
    code = STOPPED.format(tests=str(ROOT / "tests"), store=tmp_path / "store", folder=str(tmp_path / "run"))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for rank in range(2)
    ]
    try:
        said, _ = ranks[0].communicate(timeout=100)
    finally:
        for rank in ranks:
            rank.kill()  # a stopped one, too
            rank.communicate()
    first, held = said.splitlines()
    seconds, kind, _ = first.split(" ", 2)
    assert kind == "CheckpointError:", said
    assert "step-000000003" in first, "it says what was waited for"
    assert float(seconds) < 5 * SECONDS, "one timeout; the rest is a busy machine"
    assert held == "[0]"


@on_ranks(2)
def test_a_file_system_that_hangs_ends_the_wait_too(tmp_path: Path) -> None:
    """A file system that hangs on one rank: there is no collective whose timeout would end the wait."""
    from torch.distributed.checkpoint import filesystem

    folder = str(tmp_path)
    from zerolap.checkpoint import writer as module

    module._GRACE_SECONDS = 1.0
    run, said, fsync = Path(folder, "run"), [], os.fsync
    _, model, zero = short_of_patience(run)

    def hang(descriptor: int) -> None:
        until(Path(folder, "go").exists)
        fsync(descriptor)

    if dist.get_rank() == 0:
        filesystem.os.fsync = hang  # type: ignore[attr-defined]
    saving = checkpoint.async_save(run, model, zero, step=1)
    for timeout in (0.1, None):
        try:
            saving.wait(timeout)
        except CheckpointError as error:
            said.append(str(error))
    dist.barrier()
    Path(folder, "go").touch()
    until(saving.is_done)
    filesystem.os.fsync = fsync  # type: ignore[attr-defined]
    short, long = said
    assert "step-000000001 is not written yet: " in short, short
    assert "step-000000001" in long, long
    if dist.get_rank() == 0:  # the other one is ended by its group
        assert "is not written yet: writing " in long, long


@on_ranks(2)
def test_background_saves_have_the_optimizers_timeout_and_another_group_after_it_has_struck(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import filesystem

    folder = str(tmp_path)
    group, model, zero = short_of_patience(folder)
    fsync, groups, said = os.fsync, [_groups[group]], []
    blocker, failed = Path(folder, "blocker"), Path(folder, "failed")
    blocker.touch()

    def late(descriptor: int) -> None:
        until(failed.exists)
        fsync(descriptor)

    for step, place in enumerate((blocker, folder, folder, folder), start=1):
        if step == 3 and dist.get_rank() == 1:
            filesystem.os.fsync = late  # type: ignore[attr-defined]
        try:
            checkpoint.async_save(place, model, zero, step=step).wait()
            said.append("saved")
        except CheckpointError:
            said.append("failed")
        if step == 3:
            failed.touch()  # by the rank that did not wait any longer
        filesystem.os.fsync = fsync  # type: ignore[attr-defined]
        groups.append(_groups[group])
        dist.barrier()
    timeout = groups[-1]._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    same = [groups[0] is groups[2], groups[2] is groups[3], groups[3] is groups[4]]
    assert timeout == SECONDS, timeout
    assert same == [True, True, False], same
    assert said == ["failed", "saved", "failed", "saved"], said
    assert checkpoint.steps(folder) == [0, 2, 4]


# --- other optimizers -------------------------------------------------------------------------------------------------

SGD = {"overlap": "none", "cls": torch.optim.SGD, "options": {"lr": 0.5}}


def _into_another_class(folder: str, kinds: dict[str, dict[str, Any]], strict: bool) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for name, kind in kinds.items():
        ddp, zero = make(kind)
        train(ddp, zero, 0, 2)
        before = snapshot(ddp, zero)
        try:
            checkpoint.load(folder, ddp, zero, strict=strict)
            said[name] = "loaded"
        except CheckpointError as error:
            said[name] = str(error)
        if said[name] != "loaded" and before is not None:
            import pickle

            assert_same(pickle.loads(before), pickle.loads(snapshot(ddp, zero)))  # type: ignore[arg-type]
        elif said[name] != "loaded":
            snapshot(ddp, zero)
        train(ddp, zero, 2, 4)
        zero.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            whole = zero.state_dict()
            said[f"{name}: state"] = sorted({key for state in whole["state"].values() for key in state})
            said[f"{name}: options"] = whole["param_groups"][0]["lr"]
    return said


def _of(cls: Any, **options: Any) -> dict[str, Any]:
    return {"overlap": "none", "cls": cls, "options": {"lr": 0.5, **options}}


OTHERS = {
    "SGD": _of(torch.optim.SGD),
    "momentum": _of(torch.optim.SGD, momentum=0.9),
    "Adam": _of(torch.optim.Adam),
    "Adamax": _of(torch.optim.Adamax),
    "Adagrad": _of(torch.optim.Adagrad),
    "Adafactor": _of(torch.optim.Adafactor),
}


def _save_adamw(folder: str) -> None:
    ddp, zero = make({"overlap": "none"})
    train(ddp, zero, 0, 2)
    checkpoint.save(folder, ddp, zero, step=2)


def test_another_optimizers_checkpoint_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    run_ranks(2, _save_adamw, str(tmp_path))
    for said in run_ranks(2, _into_another_class, str(tmp_path), OTHERS, True):
        for name in OTHERS:
            assert "saved with the optimizer AdamW, not " in said[name], (name, said[name])


def test_with_strict_off_another_optimizer_takes_what_fits(tmp_path: Path) -> None:
    run_ranks(2, _save_adamw, str(tmp_path))
    said = run_ranks(2, _into_another_class, str(tmp_path), OTHERS, False)[0]
    for name in OTHERS:
        assert said[name] == "loaded", said[name]
        assert said[f"{name}: options"] == 0.5, "the options are those of the optimizer that is there"
    assert said["SGD: state"] == []
    assert said["momentum: state"] == ["momentum_buffer"]
    assert said["Adam: state"] == ["exp_avg", "exp_avg_sq", "step"]
    assert said["Adamax: state"] == ["exp_avg", "exp_inf", "step"]
    assert said["Adagrad: state"] == ["step", "sum"]


def test_a_checkpoint_that_names_no_class_is_known_by_its_state(tmp_path: Path) -> None:
    """Of a single file, or of an older version."""
    run_ranks(2, _save_adamw, str(tmp_path / "named"))
    convert.to_file(path_of(tmp_path / "named", 2), tmp_path / "whole.pt")
    convert.from_file(tmp_path / "whole.pt", tmp_path / "nameless")
    kinds = {**OTHERS, "AdamW": {"overlap": "none"}, "amsgrad": _of(torch.optim.AdamW, amsgrad=True)}
    for said in run_ranks(2, _into_another_class, str(tmp_path / "nameless"), kinds, True):
        for name in ("SGD", "momentum", "Adamax", "Adagrad", "Adafactor"):
            assert "does not fit" in said[name], (name, said[name])
        for name in ("Adam", "AdamW", "amsgrad"):  # the same state, and the checkpoint's options
            assert said[name] == "loaded", (name, said[name])
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    del whole["optimizer"]["state"][3]["exp_avg_sq"]
    torch.save(whole, tmp_path / "less.pt")
    convert.from_file(tmp_path / "less.pt", tmp_path / "less")
    for said in run_ranks(2, _into_another_class, str(tmp_path / "less"), {"AdamW": {"overlap": "none"}}, True):
        assert "the state of layers.1.bias has ['exp_avg', 'step'], where AdamW keeps" in said["AdamW"]


def _plain_dcp_into_sgd(folder: str) -> str:
    import torch.distributed.checkpoint as dcp

    ddp, zero = make({"overlap": "none"})
    train(ddp, zero, 0, 2)
    dcp.save({"optimizer": zero.sharded_state_dict(ddp)}, checkpoint_id=folder)
    ddp, zero = make(SGD)
    whole = {"optimizer": zero.sharded_state_dict(ddp, make_room=True)}
    dcp.load(whole, checkpoint_id=folder)
    try:
        zero.load_sharded_state_dict(whole["optimizer"], ddp)
    except ValueError as error:
        assert zero.param_groups[0]["lr"] == 0.5
        return str(error)
    return "loaded"


def test_plain_dcp_refuses_options_of_another_class(tmp_path: Path) -> None:
    for said in run_ranks(2, _plain_dcp_into_sgd, str(tmp_path)):
        assert "are none of SGD's" in said, said


class _Nested(torch.optim.Optimizer):
    """Keeps lists and dicts of tensors in its state, as classes with a history or with factors do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state.update(
                    past=[torch.zeros(3), torch.zeros(2, 2)], factors={"left": torch.zeros(2)}, sizes=[1, 2], num=0
                )
            state["past"][0] += 1
            state["past"][1] += param.grad.sum()
            state["factors"]["left"] += param.grad.norm()
            state["num"] += 1
            param.add_(param.grad, alpha=-0.1)


@on_ranks(2)
def test_states_of_lists_and_dicts_come_back(tmp_path: Path) -> None:
    folder = str(tmp_path)
    kind = {"overlap": "none", "cls": _Nested, "options": {"lr": 0.1}}
    ddp, zero = make(kind)
    train(ddp, zero, 0, 2)
    checkpoint.save(folder, ddp, zero, step=1)
    there, loaded = make(kind)
    checkpoint.load(folder, there, loaded)
    for mine, theirs in zip(zero.optim.state.values(), loaded.optim.state.values(), strict=True):
        assert_same(dict(mine), dict(theirs))
    assert len(loaded.optim.state) > 0
