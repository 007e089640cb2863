"""What one rank has of a mean gradient: its ranges, and for a while the whole, or what a later backward has added. No operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Range(Protocol):
    """Elements of a gradient, in memory order, that this rank has."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    def view_of(self, memory: Tensor) -> Tensor:
        """These elements."""


class Slot(NamedTuple):
    """What stays of one parameter's gradient from backward to backward."""

    number: int  # among all gradients
    optimizer: int  # its number
    name: str
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    ranges: Sequence[Range]

    def in_memory_order(self, whole: Tensor) -> Tensor:
        """All elements, or one for all of them, as one dimension, in the order in which the parameter lies in memory."""
        if whole.shape != self.shape or whole.stride() != self.strides:
            whole = torch.empty_strided(self.shape, self.strides, dtype=whole.dtype, device=whole.device).copy_(whole)
        return whole.as_strided((whole.numel(),), (1,))

    def shaped(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.shape, self.strides)


class Source(Protocol):
    """Who has shown gradients, and can ask the other ranks."""

    def refuse_stale(self, part: Part) -> None:
        """An error if its memory has other gradients by now, or none."""

    def collect(self, part: Part) -> Tensor:
        """All elements, in memory order."""

    def norms(self, order: float) -> Tensor:
        """Of all gradients, by the numbers of their slots."""

    def agree(self, found: Tensor, optimizers: set[int]) -> None:
        """Bring ``found``, which a loss scaler has of these optimizers' gradients, to the largest of all ranks."""

    def note_change(self) -> None:
        """Some gradient was written to."""

    def note_added(self) -> None:
        """DDP has taken what a backward has added to a gradient."""


@dataclass(slots=True, eq=False)
class Part:
    """What this rank has of one mean gradient."""

    source: Callable[[], Source | None]  # a weak reference
    backward: int  # its number
    slot: Slot
    memory: Tensor  # in which its ranges lie
    whole: Tensor | None = None  # all of it, while somebody may have views of that
    local: Tensor | None = None  # what later backwards have added on this rank alone
    is_zero: bool = False  # it was cleared in place
    is_reduced_anew: bool = False  # DDP has taken what was added

    def ranges(self) -> Iterator[Tensor]:
        for each in self.slot.ranges:
            yield each.view_of(self.memory)

    def write(self, whole: Tensor) -> None:
        """Take this rank's ranges of it."""
        flat = self.slot.in_memory_order(whole)
        for each in self.slot.ranges:
            each.view_of(self.memory).copy_(flat[each.start : each.stop])

    def flat(self) -> Tensor:
        """This rank's ranges, and zeros for those of others."""
        flat = self.memory.new_zeros(self.slot.shape.numel())
        for each in self.slot.ranges:
            flat[each.start : each.stop] = each.view_of(self.memory)
        return flat

    def settle(self) -> None:
        """Bring what was written to views of the whole to the ranges."""
        if self.whole is not None:
            self.write(self.whole)

    def find_source(self) -> Source:
        source = self.source()
        if source is None:
            raise RuntimeError(f"the mean gradient of {self.slot.name} is gone: its optimizer was detached or dropped")
        source.refuse_stale(self)
        return source

    def usable(self) -> Source:
        """Who can be asked for it, if it is one number on all ranks."""
        source = self.find_source()
        if self.local is not None:
            raise RuntimeError(
                f"the gradient of {self.slot.name} is the mean over ranks of one backward and this rank's own of another, which was under "
                "no_sync(): use it after a backward that is not"
            )
        return source

    def collected(self) -> Tensor:
        """All of it, with the parameter's shape and dtype. A collective, unless it is kept."""
        source = self.usable()
        if self.whole is not None:
            return self.whole
        return self.slot.shaped(source.collect(self).to(self.slot.dtype))

    def clear(self) -> None:
        """Set it to zero; what was freed is not written to."""
        source = self.source()
        self.is_zero, self.whole, self.local = True, None, None
        if source is not None:
            source.note_change()

    def add_local(self, gradient: Tensor) -> None:
        """A backward adds this rank's own."""
        if not self.is_zero:
            self.find_source()
        if self.local is None:
            local = torch.empty_strided(
                self.slot.shape, self.slot.strides, dtype=self.slot.dtype, device=gradient.device
            )
            self.local = local.copy_(gradient)
        else:
            self.local.add_(gradient)
