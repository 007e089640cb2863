"""What Lightning's strategy and callback do, for either of the packages that Lightning comes as. Imports neither.

The strategy is Lightning's DDPStrategy, and shards what ``configure_optimizers`` has returned; everything else about DDP is its own.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import zerolap
from zerolap_integrations import _options, _state
from zerolap_integrations._frameworks import Unknown
from zerolap_integrations._live import LivePoints


class ShardingStrategy(Unknown):
    """To be put before Lightning's DDPStrategy.

    Args:
        checkpoint: ``"full"``: one file with the form of the plain optimizer's, which any strategy loads. ``"sharded"``: a folder, to which
            every rank writes its own part, see ``zerolap.checkpoint``. Either is loaded, on any number of ranks.
        **options: What ``zerolap.attach`` takes, such as ``gather``; the schedule is ``"on_step"`` unless it is given. All others are those
            of Lightning's DDPStrategy, and DDP's.
    """

    optimizers: Any

    def __init__(self, *args: Any, checkpoint: Literal["full", "sharded"] = "full", **options: Any) -> None:
        if checkpoint not in ("full", "sharded"):
            raise ValueError(f"checkpoint must be 'full' or 'sharded', got {checkpoint!r}")
        self._checkpoint = checkpoint
        self._zerolap_options, others = _options.split(options)
        self._undo = ExitStack()
        self._is_failing = self._has_loaded = False
        super().__init__(*args, **others)

    @property
    def handle(self) -> zerolap.Handle | None:
        """What ``zerolap.attach`` has returned; None unless a fit is going on."""
        found = [each.handle for each in self._sharded()]
        return found[0] if found else None

    def _sharded(self) -> list[zerolap.ZeroRedundancyOptimizer]:
        return _state.sharded_of(self.optimizers)

    # --- training -----------------------------------------------------------------------------------------------------

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        self._is_failing = False
        plain = [_state.unwrapped(each) for each in self.optimizers]
        if any(type(each).__name__ == "_MockOptimizer" for each in plain):
            return  # configure_optimizers() has returned None, of which Lightning has warned
        assert isinstance(self.model, DistributedDataParallel)
        if all(isinstance(each, zerolap.ZeroRedundancyOptimizer) for each in plain):
            if plain[0].handle is None:
                zerolap.attach(self.model, plain, **{"schedule": "on_step", **self._zerolap_options})
        else:
            zerolap.shard(self.model, plain, **self._zerolap_options)
        self.optimizers = plain  # their class has changed, which Lightning's wrappers imitate
        handle = self.handle
        assert handle is not None
        self._undo.callback(self._detach, handle)

    def on_exception(self, exception: BaseException) -> None:
        self._is_failing = True
        super().on_exception(exception)

    def teardown(self) -> None:
        self._undo.close()
        super().teardown()

    def _detach(self, handle: zerolap.Handle) -> None:
        if not self._is_failing:  # else other ranks may be anywhere
            handle.detach()

    # --- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """A sharded checkpoint is loaded into model and optimizer at once."""
        path = self.lightning_module.trainer.ckpt_path
        return path is not None and Path(path).is_dir()

    def optimizer_state(self, optimizer: Optimizer) -> Any:
        sharded = _state.sharded_of([optimizer])
        if not sharded:
            return super().optimizer_state(optimizer)
        if self._checkpoint == "sharded":
            return {}  # every rank writes its own part
        with _state.whole_states(sharded):
            return sharded[0].state_dict() if self.is_global_zero else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        sharded = self._sharded()
        if self._checkpoint == "full" or not sharded or "optimizer_states" not in checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise TypeError("a sharded checkpoint is written to a folder, and takes no storage_options")
        if "://" in str(filepath):
            raise ValueError(f"a sharded checkpoint is written to a folder that all ranks share, and not to {filepath}")
        path = Path(self.broadcast(filepath))
        if self.is_global_zero and path.is_file():
            path.unlink()
        rest = {key: value for key, value in checkpoint.items() if key != "optimizer_states"}
        if _are_same(rest["state_dict"], self.lightning_module.state_dict()):
            del rest["state_dict"]  # unless a callback has put averages in its place
        buffer = io.BytesIO()
        torch.save(rest, buffer)
        extra = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        step = checkpoint["global_step"]
        zerolap.checkpoint.save(path, self.lightning_module, sharded, step=step, extra=extra, keep=1, overwrite=True)

    def load_checkpoint(self, checkpoint_path: Any, **options: Any) -> Any:
        path = Path(self.broadcast(checkpoint_path))
        self._has_loaded = path.is_dir()
        if not self._has_loaded:
            return super().load_checkpoint(checkpoint_path, **options)
        module = self.lightning_module
        # The optimizers of the last fit are still here; to evaluate, whatever model it is, they are not asked.
        optimizers = self._sharded() if module.trainer.state.fn == "fit" else []
        loaded = zerolap.checkpoint.load(path, module, optimizers or None, strict=module.strict_loading)
        buffer = io.BytesIO(loaded.extra.numpy().tobytes())
        # Where Lightning says nothing torch decides, as it does for Lightning's own checkpoints.
        rest = torch.load(buffer, map_location="cpu", weights_only=options.get("weights_only"))
        return {"state_dict": module.state_dict(), "optimizer_states": [], **rest}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if not self._has_loaded:
            super().load_optimizer_state_dict(checkpoint)


def _are_same(saved: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Whether these are the tensors of the model, and not others."""
    return saved.keys() == live.keys() and all(
        value is live[name] or (isinstance(value, torch.Tensor) and value.data_ptr() == live[name].data_ptr())
        for name, value in saved.items()
    )


class LiveLook(Unknown):
    """To be put before Lightning's Callback: logs how much of the communication was hidden, how long training has waited for it, bytes and memory.

    Args:
        every_n_steps: How often. Default: the trainer's ``log_every_n_steps``.
        prefix: Of the names.
    """

    def __init__(self, every_n_steps: int | None = None, *, prefix: str = "zerolap") -> None:
        super().__init__()
        self._every_n_steps = every_n_steps
        self._prefix = prefix
        self._points: LivePoints | None = None
        self._last_step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        handles = [getattr(_state.unwrapped(each), "handle", None) for each in trainer.optimizers]
        if not handles or handles[0] is None:
            raise RuntimeError(
                f"{type(self).__name__} needs an optimizer that zerolap has sharded; use ZeroLapStrategy"
            )
        self._points = LivePoints(handles[0], prefix=self._prefix)
        self._last_step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        step = trainer.global_step
        if self._points is None or step - self._last_step < (self._every_n_steps or trainer.log_every_n_steps):
            return
        self._last_step = step
        points = self._points.take(step)
        for logger in trainer.loggers:
            logger.log_metrics(points, step=step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._points = None
