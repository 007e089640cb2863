"""Which dtype is kept, reduced and sent, where that is not the parameters' own."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from zerolap.schedule.ownership import Piece
from zerolap.schedule.wire_format import Wire, in_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """What is kept, reduced and sent in another dtype than the parameters'."""

    master_weights: bool = False
    reduce_dtype: torch.dtype | None = None
    gather_dtype: torch.dtype | None = None
    wire: Wire = field(default_factory=Wire)

    @property
    def keeps_masters(self) -> bool:
        """Whether parameters, or some of them, are rounded from a master."""
        return self.master_weights or self.wire.gathers_in is not None

    def has_masters(self, dtype: torch.dtype) -> bool:
        """Whether parameters of this dtype are rounded from a master."""
        if self.wire.gathers_in is not None:
            return True
        return self.master_weights and (dtype.itemsize < 4 or self.gather_dtype not in (None, dtype))

    def stepped_as(self, dtype: torch.dtype) -> torch.dtype:
        """In what the shards of such parameters are updated: with masters in single precision, or more if they have it."""
        return torch.float32 if self.has_masters(dtype) and dtype.itemsize < 4 else dtype

    def summed_as(self, dtype: torch.dtype) -> torch.dtype:
        """In what gradients of this dtype are added up."""
        if self.wire.reduces_in is not None:
            return torch.float32 if dtype.itemsize < 4 else dtype
        return self.reduce_dtype or dtype

    def num_summed(self, piece: Piece) -> int:
        """The elements that a piece takes where gradients are added up."""
        numel = piece.stop - piece.start
        return numel if self.wire.reduces_in is None else in_blocks(numel)
