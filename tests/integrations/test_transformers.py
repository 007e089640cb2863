"""The Transformers Trainer, the real library, with a plain optimizer and with one line more; PEFT and TRL, too. Run by
`tox run -e integrations`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.framework_ranks import check, run

pytestmark = pytest.mark.integrations

CLIPPED = 1e-6  # the norm is added up in another order; parameters of up to 1 differed by at most 1e-7
PROGRAMS = "support.transformers_programs"
FREE: dict[str, Any] = {"max_grad_norm": 0.0}

# What a user may ask for, and what is asked of zerolap beside it.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (FREE, {}),
    "clipped": ({"max_grad_norm": 0.05}, {}),
    "accumulated and clipped": ({"max_grad_norm": 0.05, "gradient_accumulation_steps": 3}, {}),
    "the best model at the end": (
        {
            **FREE,
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "load_best_model_at_end": True,
            "save_total_limit": 1,
        },
        {},
    ),
    "bf16": ({**FREE, "bf16": True}, {}),
    "unused parameters looked for": ({**FREE, "ddp_find_unused_parameters": True}, {}),
    "lazy gathers": (FREE, {"ours": {"gather": "lazy"}}),
    "trained twice": ({**FREE, "num_trainings": 2}, {}),
    "lora": ({"kind": "lora", "max_grad_norm": 0.05}, {}),
    "trl": ({"kind": "trl"}, {}),
    "compiled": ({**FREE, "torch_compile": True}, {}),
}
NUM_UPDATES = {"accumulated and clipped": 6, "trained twice": 32, "trl": 8}
CLIPS = ("clipped", "accumulated and clipped", "lora", "trl")


def test_every_way_of_training_gives_the_plain_numbers_and_half_of_the_state(tmp_path: Path) -> None:
    cases = {}
    for name, (common, ours) in WAYS.items():
        cases |= {name: {**common, **ours, "line": True}, f"{name}, plain": {**common, "line": False}}
    found = run(2, PROGRAMS, tmp_path, cases)
    for name in WAYS:
        ours, plain = found[name], found[f"{name}, plain"]
        check(
            ours, plain, num_updates=NUM_UPDATES.get(name, 16), tolerance=CLIPPED if name in CLIPS else 0.0, what=name
        )
        assert ours[0].said["best"] == plain[0].said["best"], name
        for mine, theirs in zip(ours[0].said["log"], plain[0].said["log"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5), name
        assert ours[0].said["norms"] == pytest.approx(plain[0].said["norms"], rel=1e-5), name
        with pytest.raises(AssertionError, match="of the state"):  # without the line
            check(plain, plain)


def test_saved_by_trainer_and_resumed_on_any_number_of_ranks(tmp_path: Path) -> None:
    more: dict[str, Any] = {**FREE, "num_train_epochs": 4, "lr_scheduler_type": "constant"}
    half = {**more, "num_train_epochs": 2, "save_strategy": "epoch"}
    plain, ours = str(tmp_path / "plain"), str(tmp_path / "ours")
    cases = {
        "whole": {**more, "line": False},
        "plain": {**half, "line": False},
        "ours": {**half, "line": True, "watches": True},
        "ours, resumed": {**more, "line": True, "resume": ours},
        "of a plain one": {**more, "line": True, "resume": plain},
        "by a plain one": {**more, "line": False, "resume": ours},
    }
    found = run(2, PROGRAMS, tmp_path, cases)
    check(found["ours"], found["plain"], num_updates=16)
    assert found["ours"][0].said["state"] == found["plain"][0].said["state"]
    for name in ("ours, resumed", "of a plain one"):
        check(found[name], found["whole"], num_updates=16)
    assert found["by a plain one"][0].params == found["whole"][0].params

    live = found["ours"][0].said["live"]  # what the callback has added to Trainer's log
    assert len(live) == 8
    assert all(0 <= each["zerolap/hidden_percent"] <= 100 and each["zerolap/sent_mb_per_update"] > 0 for each in live)

    for num_ranks, tolerance in ((1, 0.0), (3, 1e-6)):  # beside Trainer's DDP on as many
        again = {"plain": {**more, "line": False, "resume": plain}, "ours": {**more, "line": True, "resume": ours}}
        elsewhere = run(num_ranks, PROGRAMS, tmp_path / f"on {num_ranks}", again)
        check(elsewhere["ours"], elsewhere["plain"], tolerance=tolerance)
