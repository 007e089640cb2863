"""Collectives: memory cut into one part per rank, as they take it, and those under way. Who starts them is elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from torch import Tensor

from zerolap._public import public
from zerolap.errors import CollectiveError


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


@public
class Waitable(Protocol):
    def wait(self) -> object: ...


@public
class Pending:
    """A collective under way. Keeps its tensors alive, and knows how to call itself when it fails."""

    __slots__ = ("_finish", "_what", "_works", "sent_bytes", "tensors")

    def __init__(
        self,
        works: Sequence[Waitable],
        *,
        tensors: Sequence[object],
        what: str,
        sent_bytes: int = 0,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._works = works
        self._finish = finish  # what is left to do once everything has arrived
        self.sent_bytes = sent_bytes  # by this rank
        # Held until waited for: freed earlier, the allocator may hand the memory to the next bucket while it is sent.
        self.tensors = tensors
        self._what = what

    def wait(self) -> None:
        """Return when the tensors may be read and written by the caller; CollectiveError if it failed or timed out."""
        try:
            for work in self._works:
                work.wait()
            if self._finish is not None:
                self._finish()
        except CollectiveError:
            raise  # already names rank and bucket
        except Exception as error:
            raise CollectiveError(f"{self._what} failed: {error}") from error
        self._works, self._finish, self.tensors = (), None, ()
