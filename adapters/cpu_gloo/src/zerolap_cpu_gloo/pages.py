"""Pages of memory handed from where they are not needed to where they are about to be. Knows addresses, not what lies there.

What is given up could go back to the system at once, and new pages be asked for: but those come one by one, filled with zeros, at a
hundred times the cost of moving some that are there.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from typing import NamedTuple

from torch import Tensor

_PAGE = mmap.PAGESIZE
_BLOCK = 128 * _PAGE
_LEAST_BYTES = 16 * _PAGE  # less is not worth a call
_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4  # mremap's
_FAILED = ctypes.c_void_p(-1).value
# The interpreter's lock is kept: to get it again would take longer than the calls.
_libc = ctypes.PyDLL(None, use_errno=True) if sys.platform == "linux" else None  # elsewhere pages stay where they are
if _libc is not None:
    for _call in (_libc.mremap, _libc.mmap):
        _call.restype = ctypes.c_void_p


class _Spare(NamedTuple):
    start: int
    owner: Tensor  # keeps the memory from being freed, and used by somebody else, while pages of it are kept


class Pages:
    """Keeps what was discarded for what is filled next: so never more than was used at once.

    Pages move by blocks, of which every tensor has the same ones always: the system notes each part of memory that has moved by itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: list[_Spare] = []
        self._can_move = _libc is not None  # as far as is known

    @property
    def num_bytes(self) -> int:
        """That are kept now."""
        return len(self._spare) * _BLOCK

    def discard(self, tensor: Tensor) -> None:
        """The values are lost, and not needed. It may be written to behind ``refill``."""
        blocks, rest = _blocks_of(tensor)
        with self._lock:
            give_back(*rest)
            if self._can_move:
                self._spare += [_Spare(start, tensor) for start in blocks]
            else:
                give_back(blocks.start, len(blocks) * _BLOCK)

    def refill(self, tensor: Tensor) -> None:
        """It is about to be written to, all of it, and nobody has since it was discarded."""
        blocks, _ = _blocks_of(tensor)
        with self._lock:
            own = {spare.start for spare in self._spare if spare.start in blocks}  # are where they were
            if own:
                self._spare = [spare for spare in self._spare if spare.start not in own]
            for start in blocks:
                if start not in own and self._spare and not self._move(self._spare.pop().start, start):
                    while self._spare:
                        give_back(self._spare.pop().start, _BLOCK)

    def release(self, most_bytes: int = 0) -> None:
        """Keep no more than this; the rest goes back to the system."""
        with self._lock:
            while self.num_bytes > most_bytes:
                give_back(self._spare.pop().start, _BLOCK)

    def _move(self, source: int, to: int) -> bool:
        """Move pages; what was there is dropped, and where they were there are none, as in memory that is new."""
        assert _libc is not None
        size, flags = ctypes.c_size_t(_BLOCK), ctypes.c_int(_MAYMOVE | _FIXED | _DONTUNMAP)
        if _libc.mremap(ctypes.c_void_p(source), size, size, flags, ctypes.c_void_p(to)) == to:
            return True
        # Older kernels refuse it before anything has changed, others might when there is nothing left at the new place.
        self._can_move = False
        give_back(source, _BLOCK)
        access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
        if _libc.mmap(ctypes.c_void_p(to), size, access, kind, -1, ctypes.c_long(0)) == _FAILED:
            raise MemoryError(
                f"{_BLOCK} bytes of memory that was there cannot be had again: error {ctypes.get_errno()}"
            )
        return False


def give_back(start: int, length: int) -> None:
    """To the system: whole pages, which read as zeros until they are written to."""
    if _libc is not None and length:
        # Harmless where the system refuses it.
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def _blocks_of(tensor: Tensor) -> tuple[range, tuple[int, int]]:
    """Where the blocks begin that lie within pages of the tensor's alone; and what is left behind them, its start and length."""
    first, end = -(-tensor.data_ptr() // _PAGE) * _PAGE, (tensor.data_ptr() + tensor.nbytes) // _PAGE * _PAGE
    if end - first < _LEAST_BYTES:
        return range(0), (0, 0)
    last = first + (end - first) // _BLOCK * _BLOCK
    return range(first, last, _BLOCK), (last, end - last)
