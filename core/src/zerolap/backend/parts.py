"""Memory cut into one part per rank, as collectives take it. Made once where the memory stays, for making it costs host time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from zerolap._public import public


@public
@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """One part per rank, of one dtype and device; parts may differ in size and be empty."""

    tensors: tuple[Tensor, ...]
    whole: Tensor | None  # all parts as one tensor, if they lie one behind the other in memory
    longest: int  # in elements
    longest_nbytes: int
    nbytes: int
    is_equal: bool  # whether all parts are equally long

    @classmethod
    def cut(cls, memory: Tensor, ends: Sequence[int]) -> Parts:
        """A tensor of one dimension, cut at ``ends``, which begin with its beginning and end with its end."""
        return cls._of(tuple(memory[a:b] for a, b in pairwise(ends)), memory)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Parts:
        """Tensors of one dimension."""
        filled = [tensor for tensor in tensors if tensor.numel()]
        whole = None
        if all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in pairwise(filled)):
            first = filled[0] if filled else tensors[0]
            whole = first.as_strided((sum(tensor.numel() for tensor in filled),), (1,))
        return cls._of(tuple(tensors), whole)

    @classmethod
    def _of(cls, tensors: tuple[Tensor, ...], whole: Tensor | None) -> Parts:
        sizes = [tensor.numel() for tensor in tensors]
        return cls(
            tensors=tensors,
            whole=whole,
            longest=max(sizes),
            longest_nbytes=max(sizes) * tensors[0].element_size(),
            nbytes=sum(tensor.nbytes for tensor in tensors),
            is_equal=min(sizes) == max(sizes),
        )
