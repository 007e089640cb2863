"""Lightning, the real library: its own loop with DDP and a plain optimizer, and with one line more. Run by `tox run -e integrations`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from support.framework_ranks import Result, check, difference, run
from zerolap_conformance.ranks import run_ranks

pytestmark = pytest.mark.integrations

# Both clip by the same norm, added up in another order, so that coefficients may differ in the last bit: after 16 steps of AdamW,
# parameters of up to 1 differed by at most 1e-7.
CLIPPED = 1e-6
PROGRAMS = "support.lightning_programs"

# What a user may ask for, and what is asked of zerolap beside it.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "evaluated": ({"evaluate": True}, {}),
    "clipped by norm": ({"gradient_clip_val": 0.05}, {}),
    "clipped by value": ({"gradient_clip_val": 0.005, "gradient_clip_algorithm": "value"}, {}),
    "loss scaled": ({"init_scale": 1024.0}, {}),
    "loss scaled too much": ({"init_scale": 1e9, "gradient_clip_val": 0.05}, {}),
    "gradients looked at": ({"kind": "looks at gradients"}, {}),
    "accumulated": ({"accumulate_grad_batches": 3}, {}),
    "optimized by hand": ({"kind": "manual"}, {}),
    "several optimizers": ({"kind": "several"}, {}),
    "unused parameters": ({"kind": "unused", "ddp": {"find_unused_parameters": True}}, {}),
    "frozen parameters": ({"kind": "frozen"}, {}),
    "fused": ({"kind": "fused", "gradient_clip_val": 0.05}, {}),
    "a scheduler that looks at metrics": ({"kind": "plateau", "evaluate": True}, {}),
    "batch norm": ({"kind": "batch norm"}, {}),
    "static graph": ({"ddp": {"static_graph": True}}, {}),
    "lazy gathers": ({"evaluate": True}, {"ours": {"gather": "lazy"}}),
    "sharded gradients": ({}, {"ours": {"shard_gradients": True}}),
    "updates inside backward": ({}, {"ours": {"schedule": "interleaved"}}),
    "bf16": ({"precision": "bf16-mixed"}, {}),
    "fitted twice": ({"num_fits": 2}, {}),
    "compiled": ({"compiled": True}, {}),
    "averaged": ({"callbacks": ("ema",), "evaluate": True}, {}),
    "averaged at the end": ({"callbacks": ("swa",), "max_epochs": 3}, {}),
}
NUM_UPDATES = {"accumulated": 6, "fitted twice": 8, "averaged at the end": 24, "loss scaled too much": None}
CLIPS = ("clipped by norm", "loss scaled too much", "fused")


@pytest.mark.parametrize("half", [0, 1])
def test_every_way_of_training_gives_the_plain_numbers_and_half_of_the_state(half: int, tmp_path: Path) -> None:
    names = [*WAYS][half::2]
    cases = {}
    for name in names:
        common, ours = WAYS[name]
        cases |= {name: {**common, **ours, "line": True}, f"{name}, plain": {**common, "line": False}}
    found = run(2, PROGRAMS, tmp_path, cases)
    for name in names:
        ours, plain = found[name], found[f"{name}, plain"]
        tolerance = CLIPPED if name in CLIPS else 0.0
        check(ours, plain, num_updates=NUM_UPDATES.get(name, 16), tolerance=tolerance, what=name)
        for key, value in plain[0].said.items():
            assert ours[0].said[key] == (pytest.approx(value, rel=1e-5) if key == "seen" else value), (name, key)
        with pytest.raises(AssertionError, match="of the state"):  # without the line
            check(plain, plain)
    if "clipped by norm" in names:
        assert difference(found["clipped by norm"][0], found["lazy gathers"][0]) > CLIPPED


def test_saved_by_lightning_and_resumed_on_any_number_of_ranks(tmp_path: Path) -> None:
    first: dict[str, dict[str, Any]] = {
        "whole": {"line": False, "max_epochs": 4},
        "plain": {"line": False, "callbacks": ("checkpoint",), "save": str(tmp_path / "plain.ckpt")},
        "full": {"line": True, "callbacks": ("checkpoint",), "save": str(tmp_path / "full.ckpt"), "evaluate": True},
        "sharded": {"line": True, "callbacks": ("checkpoint", "ema"), "ours": {"checkpoint": "sharded"}},
        "averaged": {"line": False, "callbacks": ("checkpoint", "ema")},
    }
    more: dict[str, Any] = {"line": True, "max_epochs": 4}
    last = {name: str(tmp_path / name / "saved/last.ckpt") for name in first}
    resumed = {
        "full, resumed": {**more, "resume": last["full"]},
        "of a plain one": {**more, "resume": last["plain"]},
        "by a plain one": {"line": False, "max_epochs": 4, "resume": last["full"]},
        "after fit": {**more, "resume": str(tmp_path / "full.ckpt")},
        "sharded, resumed": {**more, "resume": last["sharded"], "callbacks": ("ema",), "evaluate": True},
    }
    averaged = {"line": False, "max_epochs": 4, "callbacks": ("ema",), "evaluate": True}
    found = run(2, PROGRAMS, tmp_path, {**first, **resumed, "averaged, whole": averaged})
    whole = found["whole"]
    assert isinstance(whole[0], Result), whole[0]
    check(found["full"], found["plain"], num_updates=16)
    assert found["full"][0].said["state"] == found["plain"][0].said["state"]  # every tensor of it
    assert Path(last["sharded"]).is_dir()
    assert Path(last["full"]).is_file()
    for name in ("full, resumed", "of a plain one", "after fit"):
        check(found[name], whole, num_updates=16)
    assert difference(found["by a plain one"][0], whole[0]) == 0
    check(found["sharded, resumed"], found["averaged, whole"], num_updates=16)

    # The same on 1 and on 3 ranks, beside Lightning's DDP on as many.
    for num_ranks, tolerance in ((1, 0.0), (3, 1e-6)):
        cases = {
            "plain": {"line": False, "max_epochs": 4, "resume": last["plain"]},
            "full": {**more, "resume": last["full"]},
            "sharded": {**more, "resume": last["sharded"], "callbacks": ("ema",)},
            "averaged": {"line": False, "max_epochs": 4, "callbacks": ("ema",), "resume": last["averaged"]},
        }
        elsewhere = run(num_ranks, PROGRAMS, tmp_path / f"on {num_ranks}", cases)
        check(elsewhere["full"], elsewhere["plain"], tolerance=tolerance)
        check(elsewhere["sharded"], elsewhere["averaged"], tolerance=tolerance)


def test_what_zerolap_does_is_logged_by_lightnings_logger(tmp_path: Path) -> None:
    (ours, _) = run(2, PROGRAMS, tmp_path, {"logged": {"line": True, "callbacks": ("monitor",)}})["logged"]
    assert isinstance(ours, Result), ours
    rows = [row for row in ours.said["logged"] if row["zerolap/hidden_percent"]]
    assert len(rows) == 8
    for row in rows:
        assert 0 <= float(row["zerolap/hidden_percent"]) <= 100
        assert float(row["zerolap/exposed_ms_per_update"]) >= 0
        assert float(row["zerolap/sent_mb_per_update"]) > 0
        assert float(row["zerolap/memory/state_mb"]) == pytest.approx(ours.state_bytes / 2**20, rel=0.05)


def _others(folder: str) -> dict[str, Any]:
    return importlib.import_module(PROGRAMS).others(folder)


def test_names_other_packages_and_what_is_refused(tmp_path: Path) -> None:
    both = run_ranks(2, _others, str(tmp_path), limit=300)
    whole = 21072  # with the plain optimizer
    for said in both:
        held, is_folder, held_too, is_folder_too = said["by name"]
        assert (is_folder, is_folder_too) == (0, 1)
        for each in (held, held_too, said["by its other name"]):
            assert 0.4 < each / whole < 0.6
        assert "must be 'full' or 'sharded', got 'whole'" in said["unknown checkpoint"]
        assert "ZeroLapMonitor needs an optimizer that zerolap has sharded" in said["nothing to watch"]
        assert "they update together" in said["in turns"]
