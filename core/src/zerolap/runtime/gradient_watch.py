"""Gradients between backward and ``step()``: are they still as backward left them? No collectives, no updates.

Updates use reduced gradients, which are elsewhere. What is written to ``.grad`` after backward has no effect, so whoever clips,
masks or removes gradients there would train otherwise than with the plain optimizer, and must be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zerolap.runtime.state_pieces import strides_in_bucket


class Gradient(NamedTuple):
    """A parameter, its place in the optimizer, and where its gradient lies in DDP's bucket."""

    param: Tensor
    place: int
    bucket: Tensor
    offset: int

    def in_bucket(self) -> Tensor:
        return self.bucket.as_strided(
            self.param.shape, strides_in_bucket(self.param), self.bucket.storage_offset() + self.offset
        )


class GradientWatch:
    """Notes all gradients at the end of backward, and finds the first that has changed since."""

    def __init__(self) -> None:
        self._gradients: Sequence[Gradient] = ()
        self.noted: list[tuple[int, int]] = []  # empty: there is nothing to compare with

    def watch(self, gradients: Sequence[Gradient]) -> None:
        self._gradients = gradients
        self.noted = []

    def note(self) -> None:
        """Addresses and versions only: a gradient that is freed shall be gone."""
        self.noted = [
            (0, 0) if (grad := each.param.grad) is None else (grad.data_ptr(), grad._version)
            for each in self._gradients
        ]

    def find_change(self, *, may_be_cleared: bool) -> str | None:
        """What has changed since it was noted, in words; None if nothing has, or if all were cleared and may be."""
        noted, self.noted = self.noted, []
        changed = []
        for each, (memory, version) in zip(self._gradients, noted, strict=False):
            grad = each.param.grad
            if (memory, version) != ((0, 0) if grad is None else (grad.data_ptr(), grad._version)):
                changed.append((each, memory))
        if not changed or (may_be_cleared and self._are_cleared()):
            return None
        found = ((each, _change_of(each, memory)) for each, memory in changed)
        return next(
            (
                f"that of parameter {each.place}, of shape {tuple(each.param.shape)}, was {how}"
                for each, how in found
                if how
            ),
            None,
        )

    def _are_cleared(self) -> bool:
        return all(each.param.grad is None or not each.param.grad.any() for each in self._gradients)


def _change_of(gradient: Gradient, memory: int) -> str | None:
    grad, bucket = gradient.param.grad, gradient.bucket
    if grad is None:
        return "removed"
    if not memory and grad.numel():
        return "set"
    if bucket.data_ptr() <= memory < bucket.data_ptr() + bucket.nbytes:
        return "written to"  # it lies in the bucket, so there is nothing to compare it with
    # DDP has copied it from its bucket: what was multiplied by one is as it was.
    before = gradient.in_bucket()
    is_same = grad.dtype is before.dtype and torch.allclose(grad, before, rtol=0, atol=0, equal_nan=True)
    return None if is_same else "changed"
