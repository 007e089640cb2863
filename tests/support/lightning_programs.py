"""Lightning's own loop, with DDP or with zerolap in one line; run on ranks. Every case is given by words, as ranks are other processes."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import grad_norm
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
        self.seen: list[float] = []

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
                    self.clip_gradients(each, gradient_clip_val=0.005, gradient_clip_algorithm="value")
                each.step()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.kind == "looks at gradients":
            self.seen += [norm.item() for norm in grad_norm(self, norm_type=2).values()]
            for param in self.layers[0].parameters():
                param.grad = param.grad / 2 if param.ndim == 1 else param.grad.mul_(0.5)  # type: ignore[operator, union-attr]

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
        "ema": lambda: lightning.pytorch.callbacks.WeightAveraging(avg_fn=get_ema_avg_fn(0.9)),  # since 2.6
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
    if "init_scale" in options:  # Lightning itself offers 16-mixed on devices only
        scaler = torch.amp.GradScaler("cpu", init_scale=options.pop("init_scale"), growth_interval=3)
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
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
    said: dict[str, Any] = {"epochs": trainer.current_epoch, "steps": trainer.global_step, "seen": model.seen}
    if save is not None:
        trainer.save_checkpoint(save)
        kept = [vars(getattr(each, "_optimizer", each)).get("_consolidated") for each in trainer.optimizers]
        assert not any(kept), "the whole state is kept on a rank after it was saved"
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


def _by_name(folder: str) -> list[int]:
    """Both names of the registry; what is held of the state, and whether the checkpoint is a folder."""
    said = []
    for name in ("zerolap", "zerolap_sharded"):
        seen, model = Seen(), Regression("")
        trainer = lightning.Trainer(
            accelerator="cpu", devices=dist.get_world_size(), strategy=name, callbacks=[seen], max_epochs=1, logger=False,
            enable_progress_bar=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(model, _loader())
        trainer.save_checkpoint(f"{folder}/{name}.ckpt")
        said += [seen.held, int(Path(f"{folder}/{name}.ckpt").is_dir())]
        metrics = [trainer.validate(Regression(""), _loader(32), ckpt_path=f"{folder}/{name}.ckpt", verbose=False)]
        metrics += [trainer.test(model, _loader(32), verbose=False)]
        assert metrics[0] == metrics[1], metrics  # of what was loaded, and of what is there
    return said


def _by_its_other_name() -> int:
    """The package ``pytorch_lightning``, which is another one than ``lightning``."""
    import pytorch_lightning

    from zerolap_integrations.pytorch_lightning import ZeroLapStrategy as Strategy

    class Same(pytorch_lightning.LightningModule):
        __init__, training_step = Regression.__init__, Regression.training_step  # type: ignore[assignment]
        configure_optimizers = Regression.configure_optimizers

    class Held(pytorch_lightning.Callback):
        on_train_end = Seen.on_train_end  # type: ignore[assignment]

    held, num_ranks = Held(), dist.get_world_size()
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu", devices=num_ranks, strategy=Strategy(), callbacks=[held], max_epochs=1, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, gradient_clip_val=0.1,
    )  # fmt: skip
    super_init = pytorch_lightning.LightningModule.__init__
    model = Same.__new__(Same)
    super_init(model)
    model.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    model.kind = ""
    trainer.fit(model, _loader())
    return held.held


class InTurns(Regression):
    """Two optimizers that update after backwards of their own, as a generator and a discriminator do."""

    def __init__(self) -> None:
        super().__init__("several")

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for each in self.optimizers():
            each.zero_grad()
            self.manual_backward(nn.functional.mse_loss(self.layers(batch[0]), batch[1]))
            each.step()


def others(folder: str) -> dict[str, Any]:
    as_torchrun()
    said: dict[str, Any] = {"by name": _by_name(folder), "by its other name": _by_its_other_name()}
    for name, make in {
        "in turns": lambda: lightning.Trainer(
            accelerator="cpu", devices=dist.get_world_size(), strategy=ZeroLapStrategy(), logger=False, max_epochs=1,
            enable_progress_bar=False, enable_checkpointing=False,
        ).fit(InTurns(), _loader()),
        "unknown checkpoint": lambda: ZeroLapStrategy(checkpoint="whole"),  # type: ignore[arg-type]
        "nothing to watch": lambda: fit(f"{folder}/watch", line=False, callbacks=("monitor",)),
    }.items():  # fmt: skip
        try:
            make()
        except Exception as error:
            said[name] = text_of(error)
    return said
