"""Gradients that are changed after an update inside backward has used them: noted, and refused by ``step()``.

[Note: gradients that are changed too late] Updates inside backward use reduced gradients, which are elsewhere. What is written to ``.grad`` after
backward has no effect, so whoever clips, masks or removes gradients there would train otherwise than with the plain optimizer, and must
be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zerolap._torch import version_of
from zerolap.runtime.bucket import Bucket
from zerolap.runtime.state_pieces import strides_in_bucket


class _Gradient(NamedTuple):
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
    """Notes all gradients at the end of backward, and refuses a step() before which one was changed."""

    def __init__(self) -> None:
        self._gradients: Sequence[_Gradient] = ()
        self.noted: list[tuple[int, int] | None] = []  # empty, or None: there is nothing to compare with

    def watch(self, buckets: Sequence[Bucket]) -> None:
        """From now on those of these buckets, which DDP has just filled."""
        self._gradients = [
            _Gradient(param, place, bucket.buffer, offset)
            for bucket in buckets
            for param, place, offset in zip(bucket.params, bucket.places, bucket.offsets, strict=True)
        ]
        self.noted = []

    def note(self) -> None:
        """Addresses and versions only: a gradient that is freed shall be gone."""
        self.noted = [
            (0, 0) if (grad := each.param.grad) is None else (grad.data_ptr(), version_of(grad))
            for each in self._gradients
        ]

    def refuse_changes(self, number: int, num_optimizers: int) -> None:
        """RuntimeError if any of an optimizer's was changed since they were noted. Asked once; all may be cleared, for updates are done."""
        change = self._find_change(number, num_optimizers)
        if change is not None:
            raise RuntimeError(
                f"gradients were changed between backward and step(), which has no effect here: {change}. The update has used the reduced "
                'ones. Use zerolap.attach(ddp, optimizer, schedule="on_step"), with which step() uses what .grad holds'
            )

    def _find_change(self, number: int, num_optimizers: int) -> str | None:
        """What has changed since it was noted, in words; None if nothing has, or if all were cleared and may be."""
        changed, asked = [], []
        for at, (each, noted) in enumerate(zip(self._gradients, self.noted, strict=False)):
            if noted is None or each.place % num_optimizers != number:
                continue
            (memory, version), self.noted[at] = noted, None
            asked.append(each)
            grad = each.param.grad
            if (memory, version) != ((0, 0) if grad is None else (grad.data_ptr(), version_of(grad))):
                changed.append((each, memory))
        if not changed or _are_cleared(asked):
            return None
        found = ((each, _change_of(each, memory)) for each, memory in changed)
        return next(
            (
                f"that of parameter {each.place // num_optimizers}, of shape {tuple(each.param.shape)}, was {how}"
                for each, how in found
                if how
            ),
            None,
        )


def _are_cleared(gradients: Iterable[_Gradient]) -> bool:
    return all(each.param.grad is None or not each.param.grad.any() for each in gradients)


def _change_of(gradient: _Gradient, memory: int) -> str | None:
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
