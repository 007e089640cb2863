"""Accelerate, the real library: its own loop with a plain optimizer, and with one line more. Run by `tox run -e integrations`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.framework_ranks import check, run
from zerolap_conformance.ranks import run_ranks

pytestmark = pytest.mark.integrations

CLIPPED = 1e-6  # the norm is added up in another order; parameters of up to 1 differed by at most 1e-7
PROGRAMS = "support.accelerate_programs"

# What a user may ask for, and what is asked of zerolap beside it.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "by its class": ({}, {}),
    "by a call": ({}, {"is_call": True}),
    "clipped": ({"clip": 0.05}, {}),
    "accumulated and clipped": ({"clip": 0.05, "gradient_accumulation_steps": 3}, {}),
    "clipped by value": ({"clip_value": 0.005}, {}),
    "loss scaled": ({"init_scale": 1024.0, "gradient_accumulation_steps": 2}, {}),
    "loss scaled too much": ({"init_scale": 1e9, "clip": 0.05}, {}),
    "with the optimizer first": ({"order": "optimizer first"}, {}),
    "prepared apart": ({"order": "apart", "clip": 0.05}, {}),
    "two models": ({"num_models": 2}, {}),
    "two models clipped together": ({"num_models": 2, "clip": 0.05}, {}),
    "bf16": ({"mixed_precision": "bf16"}, {}),
    "lazy gathers": ({}, {"ours": {"gather": "lazy"}}),
    "sharded gradients": ({"gradient_accumulation_steps": 2}, {"ours": {"shard_gradients": True}}),
    "compiled": ({"compiled": True}, {}),
}
NUM_UPDATES = {"accumulated and clipped": 6, "sharded gradients": 8, "loss scaled": 8, "loss scaled too much": None}


def test_every_way_of_training_gives_the_plain_numbers_and_half_of_the_state(tmp_path: Path) -> None:
    cases = {}
    for name, (common, ours) in WAYS.items():
        cases |= {name: {**common, **ours, "line": True}, f"{name}, plain": {**common, "line": False}}
    found = run(2, PROGRAMS, tmp_path, cases)
    for name, (common, _) in WAYS.items():
        ours, plain = found[name], found[f"{name}, plain"]
        check(
            ours,
            plain,
            num_updates=NUM_UPDATES.get(name, 16),
            tolerance=CLIPPED if "clip" in common else 0.0,
            what=name,
        )
        assert ours[0].said["rates"] == plain[0].said["rates"], name
        assert ours[0].said["norms"] == pytest.approx(plain[0].said["norms"], rel=1e-5, nan_ok=True), name
        assert ours[0].said["logged"]["zerolap/memory/state_mb"] > 0
        with pytest.raises(AssertionError, match="of the state"):  # without the line
            check(plain, plain)


def test_saved_by_accelerate_and_resumed_on_any_number_of_ranks(tmp_path: Path) -> None:
    cases = {
        "plain": {"line": False, "epochs": 1, "saves": True},
        "ours": {"line": True, "epochs": 1, "saves": True},
        "ours, resumed": {"line": True, "epochs": 1, "resume": str(tmp_path / "ours")},
        "of a plain one": {"line": True, "epochs": 1, "resume": str(tmp_path / "plain")},
        "plain, resumed": {"line": False, "epochs": 1, "resume": str(tmp_path / "plain")},
        "by a plain one": {"line": False, "epochs": 1, "resume": str(tmp_path / "ours")},
    }
    found = run(2, PROGRAMS, tmp_path, cases)
    check(found["ours"], found["plain"], num_updates=8)
    for rank in range(2):
        for what in ("state", "files"):
            assert found["ours"][rank].said[what] == found["plain"][rank].said[what]
    for name in ("ours, resumed", "of a plain one"):
        check(found[name], found["plain, resumed"], num_updates=8)
    assert found["by a plain one"][0].params == found["plain, resumed"][0].params

    for num_ranks, tolerance in ((1, 0.0), (3, 1e-6)):  # beside Accelerate's DDP on as many
        cases = {
            "plain": {"line": False, "epochs": 1, "resume": str(tmp_path / "plain")},
            "ours": {"line": True, "epochs": 1, "resume": str(tmp_path / "ours")},
        }
        elsewhere = run(num_ranks, PROGRAMS, tmp_path / f"on {num_ranks}", cases)
        check(elsewhere["ours"], elsewhere["plain"], tolerance=tolerance)


def _misused() -> dict[str, str]:
    """What is said of each misuse."""
    import torch
    from accelerate import Accelerator
    from torch import nn

    from support.framework_ranks import as_torchrun
    from zerolap_integrations.accelerate import ZeroLapAccelerator, shard

    as_torchrun()

    def after_prepare() -> None:
        accelerator, model = Accelerator(cpu=True), nn.Linear(4, 4)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        shard(accelerator)

    def optimizer_alone() -> None:
        ZeroLapAccelerator(cpu=True).prepare(torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1))

    def over_two_models() -> None:
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        both = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        ZeroLapAccelerator(cpu=True).prepare(first, second, both)

    misuses = {
        "after prepare": after_prepare,
        "twice": lambda: shard(ZeroLapAccelerator(cpu=True)),
        "unknown option": lambda: shard(Accelerator(cpu=True), stage=3),
        "optimizer alone": optimizer_alone,
        "over two models": over_two_models,
    }
    said = {}
    for name, misuse in misuses.items():
        with pytest.raises((ValueError, TypeError)) as caught:
            misuse()
        said[name] = str(caught.value)
    return said


def test_what_cannot_be_is_refused_on_every_rank() -> None:
    for said in run_ranks(2, _misused):
        for name, words in {
            "after prepare": "call shard() before prepare()",
            "twice": "call shard() once",
            "unknown option": "no options ['stage']",
            "optimizer alone": "parameters of no model that was prepared",
            "over two models": "parameters of several models",
        }.items():
            assert words in said[name]
