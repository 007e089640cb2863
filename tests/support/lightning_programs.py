"""Lightning's own loop, with DDP or with zerolap in one line; run on ranks. Every case is given by words, as ranks are other processes."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from support.framework_ranks import Result, as_torchrun, held_by, numbers_of, text_of
from zerolap_integrations.lightning import ZeroLapMonitor, ZeroLapStrategy


class Regression(lightning.LightningModule):
    """What a user might write; ``kind`` says which."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        norm = [nn.BatchNorm1d(64)] if kind == "batch norm" else []
        self.layers = nn.Sequential(nn.Linear(32, 64), *norm, nn.ReLU(), nn.Linear(64, 8))
        if kind == "unused":
            self.unused = nn.Linear(4, 4)
        if kind == "frozen":
            self.layers[0].weight.requires_grad_(False)
        self.automatic_optimization = kind not in ("manual", "several")
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        if not self.automatic_optimization:
            optimizers = self.optimizers()
            optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
            for each in optimizers:
                each.zero_grad()
            self.manual_backward(loss)
            for each in optimizers:
                if self.kind == "manual":
                    self.clip_gradients(each, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
                each.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.layers(x), y), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        if self.kind == "several":
            first, last = self.layers[0], self.layers[-1]
            return [torch.optim.SGD(first.parameters(), 0.1, 0.9), torch.optim.AdamW(last.parameters(), 1e-2)]
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=self.kind == "fused")
        if self.kind == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Seen(Callback):
    """What there was at the end of training, before anything is given up."""

    held = 0
    num_updates: int | None = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.held = sum(held_by(each) for each in trainer.optimizers)
        handle = getattr(trainer.strategy, "handle", None)
        self.num_updates = None if handle is None else handle.stats().num_updates


def _loader(num_samples: int = 128) -> DataLoader[Any]:
    x = torch.randn(num_samples, 32, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :8]), batch_size=8)


def _callbacks(names: tuple[str, ...], folder: str) -> list[Any]:
    made: dict[str, Any] = {
        "checkpoint": lambda: ModelCheckpoint(f"{folder}/saved", filename="{epoch}", save_last=True, save_top_k=-1),
        "ema": lambda: WeightAveraging(avg_fn=get_ema_avg_fn(0.9)),
        "swa": lambda: StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1),
        "monitor": lambda: ZeroLapMonitor(every_n_steps=2),
    }
    return [made[name]() for name in names]


def fit(
    folder: str,
    kind: str = "",
    *,
    line: bool,
    ddp: dict[str, Any] | None = None,
    ours: dict[str, Any] | None = None,
    callbacks: tuple[str, ...] = (),
    resume: str | None = None,
    save: str | None = None,
    evaluate: bool = False,
    num_fits: int = 1,
    compiled: bool = False,
    **options: Any,
) -> Result:
    """Train as a user would; ``save`` is by Lightning's own call, after fitting."""
    lightning.seed_everything(0)
    model, seen = Regression(kind), Seen()
    given: Any = torch.compile(model) if compiled else model
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 2}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=ZeroLapStrategy(**(ddp or {}), **(ours or {})) if line else DDPStrategy(**(ddp or {})),
        logger=CSVLogger(folder, name="", version="") if "monitor" in callbacks else False,
        callbacks=[seen, *_callbacks(callbacks, folder)],
        enable_checkpointing="checkpoint" in callbacks,
        **{**quiet, **options},
    )
    for number in range(num_fits):
        if number:
            trainer.fit_loop.max_epochs += 1
        trainer.fit(given, _loader(), _loader(32) if evaluate else None, ckpt_path=resume)
    said: dict[str, Any] = {"epochs": trainer.current_epoch, "steps": trainer.global_step}
    if save is not None:
        trainer.save_checkpoint(save)
        saved = torch.load(save, weights_only=True) if Path(save).is_file() else None
        if saved is not None:
            live = dict(model.state_dict())
            assert saved["state_dict"].keys() == live.keys()
            assert all(torch.equal(saved["state_dict"][name], value) for name, value in live.items())
            said["state"] = [
                numbers_of(
                    {f"{index} {key}": value for index, state in each["state"].items() for key, value in state.items()}
                )
                for each in saved["optimizer_states"]
            ]
    if evaluate:
        said["metrics"] = [
            trainer.validate(model, _loader(32), verbose=False),
            trainer.test(model, _loader(32), verbose=False),
        ]
    if "monitor" in callbacks and line and dist.get_rank() == 0:
        with open(f"{folder}/metrics.csv") as file:
            said["logged"] = list(csv.DictReader(file))
    params = numbers_of({**dict(model.named_parameters()), **dict(model.named_buffers())})
    return Result(params=params, state_bytes=seen.held, num_updates=seen.num_updates, said=said)


def all_of(folder: str, cases: dict[str, dict[str, Any]]) -> dict[str, Result | str]:
    """Every case, one after another, in the same processes; an error as its text, and then no more."""
    as_torchrun()
    results: dict[str, Result | str] = {}
    for name, options in cases.items():
        try:
            results[name] = fit(f"{folder}/{name}", **options)
        except Exception as error:
            results[name] = text_of(error)
            break
    return results
