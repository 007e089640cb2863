"""Pages of memory given back to the system, while the memory itself stays where it is. Knows addresses, not tensors."""

from __future__ import annotations

import ctypes
import mmap
import sys

_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # elsewhere the same advice keeps the pages
_LEAST_BYTES = 16 * _PAGE  # less is not worth a call


def give_pages_back(start: int, num_bytes: int) -> None:
    """What lies in whole pages there is lost, and reads as zeros until it is written to. Harmless where the system will not do it."""
    first = -(-start // _PAGE) * _PAGE
    length = (start + num_bytes) // _PAGE * _PAGE - first
    if _libc is None or length < _LEAST_BYTES:
        return
    # Large pages come back at a third of the cost: some thousand interrupts for a bucket otherwise.
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTNEED):
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), advice)
