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
_LEAST_BYTES = 16 * _PAGE  # less is not worth a call
_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4  # mremap's
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None  # elsewhere pages stay where they are
if _libc is not None:
    for _call in (_libc.mremap, _libc.mmap):
        _call.restype = ctypes.c_void_p


class _Spare(NamedTuple):
    start: int
    length: int  # in whole pages
    owner: Tensor  # keeps the memory from being freed, and used by somebody else, while pages of it are kept


class Pages:
    """Keeps what was discarded for what is filled next: so never more than was used at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: list[_Spare] = []
        self._can_move = _libc is not None  # as far as is known

    @property
    def num_bytes(self) -> int:
        """That are kept now."""
        return sum(spare.length for spare in self._spare)

    def discard(self, tensor: Tensor) -> None:
        """The values are lost, and not needed. It may be written to behind ``refill``."""
        start, length = _whole_pages(tensor)
        if length < _LEAST_BYTES:
            return
        with self._lock:
            self._spare.append(_Spare(start, length, tensor))
            if not self._can_move:
                _give_back(self._spare.pop())

    def refill(self, tensor: Tensor) -> None:
        """It is about to be written to, all of it, and nobody has since it was discarded."""
        start, length = _whole_pages(tensor)
        with self._lock:
            own = sum(spare.length for spare in self._spare if start <= spare.start < start + length)
            self._spare = [spare for spare in self._spare if not start <= spare.start < start + length]
            if own == length:
                return  # they are where they were
            while length >= _LEAST_BYTES and self._spare:
                source, available, owner = self._spare.pop()
                moved = min(length, available)
                if not self._move(source, start, moved):
                    return
                if available > moved:
                    self._spare.append(_Spare(source + moved, available - moved, owner))
                start, length = start + moved, length - moved

    def release(self, most_bytes: int = 0) -> None:
        """Keep no more than this; the rest goes back to the system."""
        with self._lock:
            excess = self.num_bytes - most_bytes
            while self._spare and excess > 0:
                spare = self._spare.pop()
                length = min(spare.length, -(-excess // _PAGE) * _PAGE)
                _give_back(spare._replace(length=length))
                if spare.length > length:
                    self._spare.append(spare._replace(start=spare.start + length, length=spare.length - length))
                excess -= length

    def _move(self, source: int, to: int, length: int) -> bool:
        """Move pages; what was there is dropped, and where they were there are none, as in memory that is new."""
        assert _libc is not None
        size, flags = ctypes.c_size_t(length), ctypes.c_int(_MAYMOVE | _FIXED | _DONTUNMAP)
        if _libc.mremap(ctypes.c_void_p(source), size, size, flags, ctypes.c_void_p(to)) == to:
            return True
        # Older kernels refuse it before anything has changed, others might when there is nothing left at the new place.
        self._can_move = False
        access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
        if _libc.mmap(ctypes.c_void_p(to), size, access, kind, -1, ctypes.c_long(0)) == _FAILED:
            raise MemoryError(
                f"{length} bytes of memory that was there cannot be had again: error {ctypes.get_errno()}"
            )
        return False


def _give_back(spare: _Spare) -> None:
    if _libc is not None:
        # Harmless where the system refuses it.
        _libc.madvise(ctypes.c_void_p(spare.start), ctypes.c_size_t(spare.length), mmap.MADV_DONTNEED)


def _whole_pages(tensor: Tensor) -> tuple[int, int]:
    """Where the pages begin that are the tensor's alone, and how many bytes they are."""
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first = -(-start // _PAGE) * _PAGE
    return first, max(0, end // _PAGE * _PAGE - first)
