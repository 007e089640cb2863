"""Checkpoints: whole or absent, loaded by any number of ranks in any layout, and nothing bad is ever loaded."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import zerolap
from support import ROOT
from support.checkpoints import ADAMW, assert_same, batch, make, snapshot, train
from support.ranks import on_ranks
from support.training import Mlp
from zerolap import checkpoint
from zerolap.checkpoint import convert
from zerolap.checkpoint import reader as reading
from zerolap.checkpoint import writer as saving
from zerolap.checkpoint.folder import path_of
from zerolap.checkpoint.reader import CheckpointError
from zerolap_conformance.ranks import run_ranks, try_ranks


class Convs(nn.Module):
    """Parameters that lie otherwise in memory than row by row, a buffer, and one that is shared."""

    def __init__(self, memory_format: torch.memory_format = torch.channels_last) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=memory_format)
        self.norm = nn.BatchNorm2d(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        image = x.reshape(-1, 1, 1, x.shape[-1]).expand(-1, 3, 4, -1)
        out: Tensor = self.head(self.norm(self.conv(image)).mean((2, 3)))
        return out


def _save(folder: str, kind: dict[str, Any], num_steps: int = 3) -> bytes | None:
    ddp, zero = make(kind)
    train(ddp, zero, 0, num_steps)
    checkpoint.save(folder, ddp, zero, step=num_steps, extra={"epoch": 7, "seen": torch.arange(3)})
    return snapshot(ddp, zero)


def _load(folder: str, kind: dict[str, Any], has_trained: bool = False) -> bytes | None:
    ddp, zero = make(kind)
    if has_trained:
        train(ddp, zero, 10, 12)
    loaded = checkpoint.load(folder, ddp, zero)
    assert (loaded.step, loaded.extra["epoch"], loaded.extra["seen"].tolist()) == (3, 7, [0, 1, 2])
    return snapshot(ddp, zero)


def _same_as_saved(saved: Any, loaded: Any) -> None:
    assert_same(pickle.loads(saved[0]), pickle.loads(loaded[0]))


def _evaluate(folder: str) -> None:
    ddp, zero = make({"model": Convs})
    train(ddp, zero, 0, 2)
    checkpoint.save(folder, ddp, zero, step=2, extra={"epoch": 7})
    saved = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    train(ddp, zero, 2, 3)
    model = Convs()  # without DDP, and before anything was trained
    for each in (model, ddp):
        loaded = checkpoint.load(folder, each, None)
        assert (loaded.step, loaded.extra) == (2, {"epoch": 7})
    for name, value in saved.items():
        if dist.get_rank() == 0 or name in dict(model.named_parameters()):  # buffers are the first rank's
            assert torch.equal(model.state_dict()[name], value), name
            assert torch.equal(ddp.module.state_dict()[name], value), name
    with pytest.raises(CheckpointError, match="does not fit the model"):
        checkpoint.load(folder, Mlp(), None)


def test_a_model_is_loaded_without_an_optimizer(tmp_path: Path) -> None:
    run_ranks(2, _evaluate, str(tmp_path))


# --- round trips ------------------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "interleaved": {},
    "on_step, lazy": {"schedule": "on_step", "gather": "lazy", "cap": 0.0005},
    "no overlap": {"overlap": "none"},
    "hook": {"overlap": "hook", "hook": zerolap.hook_with_zero_step, "shard_buckets": True},
    "whole parameters": {"overlap": "hook", "hook": zerolap.hook_with_zero_step_interleaved},
}


@pytest.mark.parametrize(
    "num_saved", [pytest.param(1, marks=pytest.mark.soak), 2, 3, pytest.param(4, marks=pytest.mark.soak)]
)
def test_saved_at_n_ranks_loads_at_m_in_any_layout(tmp_path: Path, num_saved: int) -> None:
    kinds = list(KINDS.values())
    saved = run_ranks(num_saved, _save, str(tmp_path), kinds[num_saved % len(kinds)])
    for place, num_loading in enumerate((1, 2, 3, 4)):
        kind = kinds[(num_saved + place) % len(kinds)]
        _same_as_saved(saved, run_ranks(num_loading, _load, str(tmp_path), kind, has_trained=place % 2 == 0))


def test_saved_at_8_ranks_loads_at_2(tmp_path: Path) -> None:
    _same_as_saved(run_ranks(8, _save, str(tmp_path), {}), run_ranks(2, _load, str(tmp_path), KINDS["on_step, lazy"]))


def _resume(folder: str, kind: dict[str, Any]) -> tuple[bytes | None, bytes | None]:
    """Train six steps with and without a stop in the middle."""
    ddp, zero = make(kind)
    train(ddp, zero, 0, 3)
    checkpoint.save(folder, ddp, zero, step=3)
    train(ddp, zero, 3, 6)
    there, loaded = make(kind)
    checkpoint.load(folder, there, loaded)
    train(there, loaded, 3, 6)
    return snapshot(ddp, zero), snapshot(there, loaded)


@pytest.mark.parametrize(
    "kind",
    [
        {"options": {"lr": 0.1, "momentum": 0.9}, "cls": torch.optim.SGD},
        {"options": {"lr": torch.tensor(0.01)}, "cls": torch.optim.AdamW},
        {"options": {"lr": 0.01}, "cls": torch.optim.Adafactor},
        {"dtype": torch.bfloat16, "master_weights": True, "reduce_dtype": torch.float32},
        {"model": Convs, "schedule": "on_step"},
    ],
    ids=["momentum", "tensor options", "whole parameters", "masters", "channels last, buffers"],
)
def test_training_goes_on_bitwise(tmp_path: Path, kind: dict[str, Any]) -> None:
    (whole, resumed), _ = run_ranks(2, _resume, str(tmp_path), kind)
    assert_same(pickle.loads(whole), pickle.loads(resumed))


@pytest.mark.parametrize("had_masters", [False, True])
def test_masters_come_and_go(tmp_path: Path, had_masters: bool) -> None:
    half, single = {"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "master_weights": True}
    kind, other = (single, half) if had_masters else (half, single)
    saved = pickle.loads(run_ranks(2, _save, str(tmp_path), kind)[0])
    loaded = pickle.loads(run_ranks(2, _load, str(tmp_path), other)[0])
    assert_same(saved["model"], loaded["model"])
    assert_same(
        {i: {k: v for k, v in s.items() if k != "master_weight"} for i, s in saved["state"].items()},
        {i: {k: v for k, v in s.items() if k != "master_weight"} for i, s in loaded["state"].items()},
    )


def test_memory_order_may_change(tmp_path: Path) -> None:
    """A model that was channels-last is loaded as one that is not: the same numbers, in another order."""
    saved = pickle.loads(run_ranks(2, _save, str(tmp_path), {"model": Convs})[0])
    loaded = pickle.loads(run_ranks(3, _load, str(tmp_path), {"model": _contiguous_convs})[0])
    assert_same(saved, loaded)


def _contiguous_convs() -> Convs:
    return Convs(torch.contiguous_format)


def _fuzz(folder: str, seed: int, is_saving: bool) -> bytes | None:
    dice = random.Random(seed)
    shapes = [tuple(dice.randint(1, 9) for _ in range(dice.randint(1, 3))) for _ in range(dice.randint(1, 12))]
    dtype = dice.choice([torch.float32, torch.float64, torch.bfloat16])
    how = random.Random(seed * 2 + is_saving)  # another layout on either side
    torch.manual_seed(0)
    model = _Loose(shapes, dtype)
    kind = {
        "model": lambda: model,
        "dtype": dtype,
        "cap": how.choice([0.0001, 0.0003, 1]),
        "options": {"lr": 0.01},
        "overlap": how.choice(["attach", "attach", "none"]),
    }
    if kind["overlap"] == "attach":
        kind |= {
            "schedule": how.choice(["interleaved", "after_backward", "on_step"]),
            "gather": how.choice(["eager", "lazy"]),
        }
    ddp, zero = make(kind)
    if is_saving or how.random() < 0.5:
        for step in range(2):
            zero.zero_grad()
            ddp(torch.full((1,), float(step + 1 + 5 * (not is_saving)), dtype=dtype)).backward()
            zero.step()
    if is_saving:
        checkpoint.save(folder, ddp, zero, step=seed)
    else:
        checkpoint.load(folder, ddp, zero)
    return snapshot(ddp, zero)


class _Loose(nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return sum(((part * x) ** 2).sum() for part in self.parts)  # type: ignore[return-value]


def _fuzz_many(folder: str, seeds: list[int], is_saving: bool) -> list[bytes | None]:
    return [_fuzz(f"{folder}/{seed}", seed, is_saving) for seed in seeds]


@pytest.mark.parametrize("num_cases", [12, pytest.param(300, marks=pytest.mark.soak)])
def test_random_models_ranks_and_layouts(tmp_path: Path, num_cases: int) -> None:
    dice, done = random.Random(num_cases), 0
    for first in range(0, num_cases, 12):
        seeds = list(range(first, first + 12))
        counts = [1, 2, 3, 4] if num_cases < 100 else [1, 2, 3, 4, 8]
        saved = run_ranks(dice.choice(counts), _fuzz_many, str(tmp_path), seeds, True)[0]
        loaded = run_ranks(dice.choice(counts), _fuzz_many, str(tmp_path), seeds, False)[0]
        for seed, a, b in zip(seeds, saved, loaded, strict=True):
            assert_same(pickle.loads(a), pickle.loads(b), f"seed {seed}")
            done += 1
    assert done == num_cases


# --- plain torch.distributed.checkpoint -------------------------------------------------------------------------------


def _plain_dcp(folder: str, is_saving: bool) -> bytes | None:
    ddp, zero = make({} if is_saving else {"schedule": "on_step"})
    if is_saving:
        train(ddp, zero, 0, 3)
        whole = {"model": ddp.module.state_dict(), "optimizer": zero.sharded_state_dict(ddp)}
        dcp.save(whole, checkpoint_id=folder)
        dcp.async_save(whole, checkpoint_id=f"{folder}-async").result()
    else:
        for source in (folder, f"{folder}-async"):
            whole = {"model": ddp.module.state_dict(), "optimizer": zero.sharded_state_dict(ddp, make_room=True)}
            dcp.load(whole, checkpoint_id=source)
            ddp.module.load_state_dict(whole["model"])
            zero.load_sharded_state_dict(whole["optimizer"], ddp)
    return snapshot(ddp, zero)


def test_plain_calls_of_torch_distributed_checkpoint(tmp_path: Path) -> None:
    folder = str(tmp_path / "plain")
    _same_as_saved(run_ranks(2, _plain_dcp, folder, True), run_ranks(3, _plain_dcp, folder, False))


# --- whole or absent --------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    folder = str(tmp_path)
    ddp, zero = make({})
    for step in range(6):
        train(ddp, zero, step, step + 1)
        if step % 2:
            checkpoint.async_save(folder, ddp, zero, step=step, keep=2)
        else:
            checkpoint.save(folder, ddp, zero, step=step, keep=2)
    with pytest.raises((FileExistsError, zerolap.ZerolapError), match="already exists"):
        checkpoint.save(folder, ddp, zero, step=4)
    checkpoint.async_save(folder, ddp, zero, step=5, keep=2, overwrite=True).wait()
    assert checkpoint.steps(folder) == [4, 5]
    assert os.readlink(Path(folder, "latest")) == "step-000000005"
    assert sorted(path.name for path in Path(folder).iterdir()) == ["latest", "step-000000004", "step-000000005"]


def _async_copies(folder: str) -> tuple[bytes | None, bytes | None]:
    ddp, zero = make({})
    train(ddp, zero, 0, 3)
    before = snapshot(ddp, zero)
    saving = checkpoint.async_save(folder, ddp, zero, step=3)
    train(ddp, zero, 3, 9)  # must not show in what is saved
    saving.wait()
    there, loaded = make({"schedule": "on_step"})
    checkpoint.load(folder, there, loaded)
    return before, snapshot(there, loaded)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    (before, loaded), _ = run_ranks(2, _async_copies, str(tmp_path))
    assert_same(pickle.loads(before), pickle.loads(loaded))


KILLED = """
import os, sys, torch, torch.distributed as dist
sys.path.insert(0, {tests!r})
from support.checkpoints import make, train
from zerolap import checkpoint
dist.init_process_group("gloo", init_method="file://{store}", rank=int(sys.argv[1]), world_size=2)
ddp, zero = make({{}})
train(ddp, zero, 0, 2)
checkpoint.save({folder!r}, ddp, zero, step=2)
for step in range(3, 10000):
    print(step, flush=True)
    checkpoint.save({folder!r}, ddp, zero, step=step, keep=2)
"""


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_kill_during_a_save_leaves_the_one_before(tmp_path: Path, guilty: int) -> None:
    folder = tmp_path / "killed"
    code = KILLED.format(tests=str(ROOT / "tests"), store=tmp_path / "store", folder=str(folder))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for rank in range(2)
    ]
    try:
        stdout = ranks[0].stdout
        assert stdout is not None
        for line in stdout:
            if int(line) >= 5:
                break
        time.sleep(random.Random(guilty).random() * 0.05)
        ranks[guilty].send_signal(signal.SIGKILL)
    finally:
        time.sleep(0.2)
        for rank in ranks:
            rank.kill()
            rank.wait()
            assert rank.stdout is not None
            rank.stdout.close()
    held = checkpoint.steps(folder)
    assert held, sorted(folder.iterdir())
    loaded_step = run_ranks(3, _load_and_save, str(folder))[0]
    assert loaded_step == max(held)
    assert not list(folder.glob("*.partial")), "what a killed save has left is removed by the next one"


def _load_and_save(folder: str) -> int:
    ddp, zero = make({})
    loaded = checkpoint.load(folder, ddp, zero)
    checkpoint.save(folder, ddp, zero, step=100_000)
    return loaded.step


@pytest.mark.parametrize(("is_terminal", "total"), [(True, 2**30), (True, 2**10), (False, 2**30)])
def test_a_long_save_shows_a_bar_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool, total: int
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with saving._progress_bar("saving step-3", total, is_shown=True) as tick:
        tick(total)
    assert ("saving step-3" in capsys.readouterr().err) == (is_terminal and total > 2**26)


# --- bad checkpoints --------------------------------------------------------------------------------------------------


class Exploit:
    """A pickle that runs code."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def _sealed(path: Path) -> None:
    """As somebody would who can write the manifest, too."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"] = {name: reading.digest_of(path / name) for name in manifest["files"]}
    (path / "manifest.json").write_text(json.dumps(manifest))


def _truncate(path: Path) -> None:
    file = path / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])


def _flip_a_bit(path: Path) -> None:
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "__0_0.distcp").write_bytes(data)


def _truncate_and_seal(path: Path) -> None:
    _truncate(path)
    _sealed(path)


def _lose_a_file(path: Path) -> None:
    (path / "__1_0.distcp").unlink()


def _empty_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("")


def _other_format(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))


def _exploit_in_metadata(path: Path) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(Exploit(str(path.parent / "exploited"))))
    _sealed(path)


def _exploit_in_an_entry(path: Path) -> None:
    """In place of what torch.distributed.checkpoint keeps as bytes."""
    from zerolap.checkpoint.reader import CheckpointReader

    reader = CheckpointReader(path)
    for index, info in reader.metadata.storage_data.items():
        if index.fqn == "optimizer.param_groups":
            with (path / info.relative_path).open("r+b") as stream:
                stream.seek(info.offset)
                payload = pickle.dumps(Exploit(str(path.parent / "exploited")))
                stream.write(payload[: info.length])
    _sealed(path)


def _exploit_instead_of_tensors(path: Path) -> None:
    (path / "__0_0.distcp").write_bytes(pickle.dumps(Exploit(str(path.parent / "exploited"))) * 10_000)
    _sealed(path)


def _path_outside(path: Path) -> None:
    data = (path / ".metadata").read_bytes().replace(b"__1_0.distcp", b"../../passwd")
    (path / ".metadata").write_bytes(data)
    _sealed(path)


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (_truncate, "is damaged"),
    "a bit flipped": (_flip_a_bit, "is damaged"),
    "truncated, and sealed again": (_truncate_and_seal, "is shorter than what should be in it"),
    "a file is missing": (_lose_a_file, "is damaged"),
    "no manifest": (_empty_manifest, "is damaged"),
    "another format": (_other_format, "has format 99"),
    "exploit in the metadata": (_exploit_in_metadata, "which no checkpoint needs"),
    "exploit in an entry": (_exploit_in_an_entry, "cannot be read"),
    "exploit instead of tensors": (_exploit_instead_of_tensors, "cannot be read"),
    "a path outside": (_path_outside, "not part of it"),
}


def _load_bad(folder: str, cases: list[str], kind: dict[str, Any]) -> dict[str, str]:
    ddp, zero = make(kind)
    train(ddp, zero, 0, 2)
    before = snapshot(ddp, zero)
    said = {}
    for case in cases:
        try:
            checkpoint.load(f"{folder}/{case}", ddp, zero)
        except CheckpointError as error:
            said[case] = str(error)
    after = snapshot(ddp, zero)
    if dist.get_rank() == 0:
        assert_same(pickle.loads(before), pickle.loads(after), "the live state")  # type: ignore[arg-type]
    train(ddp, zero, 2, 4)  # and training goes on
    return said


def test_bad_checkpoints_are_refused_on_all_ranks_and_change_nothing(tmp_path: Path) -> None:
    run_ranks(2, _save, str(tmp_path / "good"), {})
    for case, (spoil, _) in BAD.items():
        shutil.copytree(tmp_path / "good", tmp_path / case, symlinks=True)
        spoil(tmp_path / case / "step-000000003")
    for rank, said in enumerate(run_ranks(2, _load_bad, str(tmp_path), list(BAD), {})):
        for case, (_, words) in BAD.items():
            assert words in said.get(case, "nothing"), f"rank {rank}, {case}: {said.get(case)}"
            print(f"rank {rank} | {case} | {said[case].splitlines()[0][:150]}")
    assert not list(tmp_path.rglob("exploited")), "code of a checkpoint was run"


class _Other(nn.Module):
    """Some parameters renamed, one of another shape, one missing, one more."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(13, 17)
        self.more = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.more(self.first(x)[:, :2])
        return out


def test_a_model_that_does_not_fit_is_told_everything(tmp_path: Path) -> None:
    run_ranks(2, _save, str(tmp_path / "one"), {})
    names = [name for name, _ in Mlp().named_parameters()]
    for said in run_ranks(2, _load_bad, str(tmp_path), ["one"], {"model": _Other}):
        for name in names:
            assert f"{name} of the checkpoint is not in the model" in said["one"]
        for name in ("first.weight", "first.bias", "more.weight", "more.bias"):
            assert f"{name} is not in the checkpoint" in said["one"]


def _not_strict(folder: str) -> tuple[bool, bool]:
    ddp, zero = make({"model": _More})
    before = ddp.module.more.weight.clone()
    checkpoint.load(folder, ddp, zero, strict=False)
    reference = Mlp()
    is_kept = torch.equal(ddp.module.more.weight, before)
    is_loaded = not torch.equal(next(ddp.module.inner.parameters()), next(reference.parameters()))
    train(ddp, zero, 0, 2)
    return is_kept, is_loaded


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


class _More(_Inner):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(13, 13)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.more(x))


def test_what_is_missing_may_be_left_as_it_is(tmp_path: Path) -> None:
    run_ranks(2, _save, str(tmp_path), {"model": _Inner})
    assert run_ranks(2, _not_strict, str(tmp_path)) == [(True, True)] * 2


@on_ranks(2)
def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    folder = str(tmp_path)
    ddp, zero = make({})
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        checkpoint.load(folder, ddp, zero)
    with pytest.raises(CheckpointError, match="safe to load"):  # on the first rank; the others are told
        checkpoint.save(folder, ddp, zero, step=1, extra=Exploit("/tmp/never"))
    with pytest.raises((ValueError, zerolap.ZerolapError), match="at least 1"):
        checkpoint.save(folder, ddp, zero, step=1, keep=0)
    assert not list(Path(folder).glob("step*"))


# --- single files -----------------------------------------------------------------------------------------------------


def _load_plain(file: str) -> bytes:
    """Into the plain class, without us."""
    whole = torch.load(file, weights_only=True)
    model = Mlp()
    model.load_state_dict(whole["model"])
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    optimizer.load_state_dict(whole["optimizer"])
    return pickle.dumps({"model": model.state_dict(), "state": optimizer.state_dict()["state"]})


def test_sharded_and_single_files_become_each_other(tmp_path: Path) -> None:
    saved = run_ranks(2, _save, str(tmp_path / "sharded"), {})
    path = path_of(tmp_path / "sharded", 3)
    convert.to_file(path, tmp_path / "single.pt")
    plain = pickle.loads(_load_plain(str(tmp_path / "single.pt")))
    for key in ("model", "state"):
        assert_same(pickle.loads(saved[0])[key], plain[key], key)
    convert.from_file(tmp_path / "single.pt", tmp_path / "back")
    _same_as_saved(saved, run_ranks(3, _load, str(tmp_path / "back"), {}))
    said = convert.describe(path)
    assert (said["step"], said["ranks"], said["state_entries"]) == (3, 2, ["exp_avg", "exp_avg_sq", "step"])


def test_anybodys_file_can_be_converted(tmp_path: Path) -> None:
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step, 0)).square().mean().backward()
        optimizer.step()
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": 3,
            "extra": {"epoch": 7, "seen": torch.arange(3)},
        },
        tmp_path / "plain.pt",
    )
    convert.from_file(tmp_path / "plain.pt", tmp_path / "sharded")
    loaded = pickle.loads(run_ranks(2, _load, str(tmp_path / "sharded"), {})[0])
    assert_same(model.state_dict(), loaded["model"])
    assert_same(optimizer.state_dict()["state"], loaded["state"])
    torch.save(Exploit(str(tmp_path / "exploited")), tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match="cannot be loaded safely"):
        convert.from_file(tmp_path / "bad.pt", tmp_path / "never")
    assert not (tmp_path / "exploited").exists()


def _differ_in_folder(folder: str) -> None:
    ddp, zero = make({})
    checkpoint.save(f"{folder}/{dist.get_rank()}", ddp, zero, step=1)


def test_a_folder_that_is_not_shared_is_found_out(tmp_path: Path) -> None:
    for outcome in try_ranks(2, _differ_in_folder, str(tmp_path)):
        assert outcome.error is not None
        assert "is not the same folder on all ranks" in outcome.error
