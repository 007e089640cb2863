"""Accelerate's own loop, plain or with zerolap in one line; run on ranks. Every case is given by words, as ranks are other processes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from support.framework_ranks import Result, as_torchrun, numbers_of, result_of, text_of
from zerolap_integrations.accelerate import ZeroLapAccelerator, ZeroLapMonitor, shard


def _accelerator(*, line: bool, ours: dict[str, Any], is_call: bool, compiled: bool, **options: Any) -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    set_seed(0)
    options |= {"cpu": True, "dynamo_backend": "inductor" if compiled else None}
    init_scale = options.pop("init_scale", None)
    if not line:
        made = Accelerator(**options)
    else:
        made = shard(Accelerator(**options), **ours) if is_call else ZeroLapAccelerator(**options, **ours)
    if init_scale is not None:  # Accelerate itself offers fp16 on devices only
        made.state._mixed_precision, made.native_amp = "fp16", True
        made.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3)
    return made


def _prepare(
    accelerator: Any, order: str, models: list[Any], opts: list[Any], loader: Any, schedulers: list[Any]
) -> Any:
    n = len(models)
    if order == "together":
        done = accelerator.prepare(*models, *opts, loader, *schedulers)
        return done[:n], done[n : 2 * n], done[2 * n], done[2 * n + 1 :]
    if order == "optimizer first":
        done = accelerator.prepare(*schedulers, *opts, loader, *models)
        return done[2 * n + 1 :], done[n : 2 * n], done[2 * n], done[:n]
    models = [accelerator.prepare(each) for each in models]
    return (
        models,
        [accelerator.prepare(each) for each in opts],
        *accelerator.prepare(loader, schedulers[0], schedulers)[::2],
    )


def _saved(accelerator: Any, models: Any, opts: Any, folder: str) -> dict[str, Any]:
    """By Accelerate's own calls; what is in the files is compared with the live model, tensor by tensor."""
    accelerator.save_state(folder)
    accelerator.save_model(models[0], f"{folder}/model")
    accelerator.wait_for_everyone()
    live = accelerator.unwrap_model(models[0]).state_dict()
    for path in (f"{folder}/model.safetensors", f"{folder}/model/model.safetensors"):
        tensors = safetensors.torch.load_file(path)
        assert tensors.keys() == live.keys(), path
        assert all(torch.equal(tensors[name], value) for name, value in live.items()), path
    state = torch.load(f"{folder}/optimizer.bin", weights_only=True)["state"]
    return {
        "state": [numbers_of(each) for each in state.values()],
        "files": sorted(each.name for each in Path(folder).iterdir()),
    }


def train(
    folder: str,
    *,
    line: bool,
    ours: dict[str, Any] | None = None,
    is_call: bool = False,
    num_models: int = 1,
    order: str = "together",
    epochs: int = 2,
    clip: float | None = None,
    clip_value: float | None = None,
    resume: str | None = None,
    saves: bool = False,
    compiled: bool = False,
    **options: Any,
) -> Result:
    """Train as a user would."""
    accelerator = _accelerator(line=line, ours=ours or {}, is_call=is_call, compiled=compiled, **options)
    x = torch.randn(128, 32)
    models: Any = [nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)) for _ in range(num_models)]
    opts: Any = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in models]
    schedulers: Any = [torch.optim.lr_scheduler.ExponentialLR(each, gamma=0.99) for each in opts]
    loader: Any = DataLoader(TensorDataset(x, x[:, :8]), batch_size=8, shuffle=True)
    models, opts, loader, schedulers = _prepare(accelerator, order, models, opts, loader, schedulers)
    if resume is not None:
        accelerator.load_state(resume)
    monitor = ZeroLapMonitor(accelerator) if line and accelerator.num_processes > 1 else None
    autocast = accelerator.autocast if "mixed_precision" in options else contextlib.nullcontext
    norms = []
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(*models):
                for model in models:
                    with autocast():
                        loss = nn.functional.mse_loss(model(x), y)
                    accelerator.backward(loss)
                if clip is not None and accelerator.sync_gradients:
                    params = [param for model in models for param in model.parameters()]
                    norms.append(accelerator.clip_grad_norm_(params, clip).item())
                if clip_value is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_value_(models[0].parameters(), clip_value)
                for opt, scheduler in zip(opts, schedulers, strict=True):
                    opt.step()
                    scheduler.step()
                    opt.zero_grad()
    said: dict[str, Any] = {"norms": norms, "rates": [each.get_last_lr() for each in schedulers]}
    if saves:
        said |= _saved(accelerator, models, opts, folder)
    if monitor is not None:
        said["logged"] = monitor.log(1)
    inner = [opt.optimizer for opt in opts]
    handles = [getattr(each, "handle", None) for each in inner]
    unwrapped = nn.ModuleList([getattr(each, "_orig_mod", each) for each in map(accelerator.unwrap_model, models)])
    assert all(type(each) is nn.Sequential for each in unwrapped)
    return result_of(
        unwrapped, inner, num_updates=None if handles[0] is None else handles[0].stats().num_updates, **said
    )


def all_of(folder: str, cases: dict[str, dict[str, Any]]) -> dict[str, Result | str]:
    """Every case, one after another, in the same processes; an error as its text, and then no more."""
    as_torchrun()
    results: dict[str, Result | str] = {}
    for name, options in cases.items():
        try:
            results[name] = train(f"{folder}/{name}", **options)
        except Exception as error:
            results[name] = text_of(error)
            break
    return results
