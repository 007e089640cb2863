"""Which dtype is kept, reduced and sent, where that is not the parameters' own."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """What is kept, reduced and sent in another dtype than the parameters'."""

    master_weights: bool = False
    reduce_dtype: torch.dtype | None = None
    gather_dtype: torch.dtype | None = None

    def has_masters(self, dtype: torch.dtype) -> bool:
        """Whether parameters of this dtype are rounded from a master."""
        return self.master_weights and (dtype.itemsize < 4 or self.gather_dtype not in (None, dtype))

    def stepped_as(self, dtype: torch.dtype) -> torch.dtype:
        """In what the shards of such parameters are updated: with masters in single precision, or more if they have it."""
        return torch.float32 if self.has_masters(dtype) and dtype.itemsize < 4 else dtype
