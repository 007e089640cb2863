"""zerolap in the Transformers Trainer: ``ZeroLapTrainer``, or one call for a trainer of another class, such as TRL's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from zerolap_integrations import _state
from zerolap_integrations._frameworks import Unknown, need
from zerolap_integrations._live import LivePoints

need("transformers")
need("accelerate")

from transformers import Trainer, TrainerCallback  # noqa: E402

from zerolap_integrations import accelerate  # noqa: E402

__all__ = ["ZeroLapMixin", "ZeroLapMonitor", "ZeroLapTrainer", "shard"]

T = TypeVar("T", bound=Trainer)


class ZeroLapMixin(Unknown):
    """To be put before ``Trainer`` or one of its subclasses, whose optimizer is then sharded: ``class Mine(ZeroLapMixin, SFTTrainer)``.

    Args:
        zerolap_options: What ``zerolap.attach`` takes, such as ``{"gather": "lazy"}``; the schedule is ``"on_step"`` unless it is given.
    """

    _zerolap_options: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, *args: Any, zerolap_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        if zerolap_options is not None:
            self._zerolap_options = zerolap_options
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        accelerate.shard(self.accelerator, **self._zerolap_options)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        # What they add to the logs is then there for all others, which write them somewhere.
        self.callback_handler.callbacks.sort(key=lambda each: not isinstance(each, ZeroLapMonitor))
        return super().train(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with _state.whole_states(_state.sharded_of([self.optimizer])):
            super()._save_optimizer_and_scheduler(output_dir)


class ZeroLapTrainer(ZeroLapMixin, Trainer):
    """Transformers' Trainer with an optimizer that is sharded over the ranks; everything else is its own."""


def shard(trainer: T, **options: Any) -> T:
    """Let ``trainer``, of whatever subclass, shard its optimizer; it stays the object it is. Called before ``train()``.

    Args:
        trainer: A Trainer that was not made of ``ZeroLapMixin``.
        **options: What ``zerolap.attach`` takes.
    """
    if isinstance(trainer, ZeroLapMixin):
        raise ValueError("this trainer shards its optimizer already; call shard() once")
    accelerate.shard(trainer.accelerator, **options)
    cls = type(trainer)
    trainer.__class__ = type(
        cls.__name__, (ZeroLapMixin, cls), {"__module__": cls.__module__, "_zerolap_options": options}
    )
    return trainer


class ZeroLapMonitor(TrainerCallback):
    """A callback that adds to what is logged: how much of the communication was hidden, how long training has waited, bytes and memory.

    Args:
        prefix: Of the names.
    """

    def __init__(self, *, prefix: str = "zerolap") -> None:
        self._prefix = prefix
        self._points: LivePoints | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sharded = _state.sharded_of([kwargs["optimizer"]])
        handle = sharded[0].handle if sharded else None
        self._points = None if handle is None else LivePoints(handle, prefix=self._prefix)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs.get("logs")
        if self._points is None or not logs or "loss" not in logs:
            return
        points = self._points.take(state.global_step)
        logs.update(points)
        if state.log_history:
            state.log_history[-1].update(points)
