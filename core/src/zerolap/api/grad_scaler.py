"""The loss scaler that knows shards. No arithmetic of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerolap._public import public
from zerolap.api.optimizer import ZeroRedundancyOptimizer
from zerolap.runtime.reduced_gradients import ReducedGradients


@public
class GradScaler(torch.amp.GradScaler):
    """torch's loss scaler for shards: unscales the mean gradients of ``on_step``, and all ranks find the same infinities."""

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        gradients = _gradients_of(optimizer) if self.is_enabled() else None
        if gradients is not None and not gradients.is_unscaled:
            self.unscale_(optimizer)
        result = super().step(optimizer, *args, **kwargs)
        if gradients is not None:
            assert isinstance(optimizer, ZeroRedundancyOptimizer)
            assert optimizer._engine is not None
            optimizer._engine.step_left_out(
                optimizer._number
            )  # if gradients were not finite, and no step has used them
        return result

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        gradients = _gradients_of(optimizer)
        if gradients is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        found = gradients.unscale_(inv_scale)
        return {found.device: found}


def _gradients_of(optimizer: Optimizer) -> ReducedGradients | None:
    """Where an optimizer's reduced gradients are, if not in ``.grad``; refuses one that has used them already."""
    if isinstance(optimizer, ZeroRedundancyOptimizer) and optimizer._overlap_with_ddp:
        return optimizer._reduced_gradients("scaling losses")
    return None
