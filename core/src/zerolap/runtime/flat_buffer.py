"""Flat buffers: the parameters of a bucket in one piece of memory, so that ranges of them can be sent. Nothing is sent here."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import accumulate
from math import lcm
from typing import NamedTuple

import torch
from torch import Tensor

from zerolap._logging import logger_of
from zerolap._torch import version_of
from zerolap.runtime.state_pieces import strides_in_bucket

logger = logger_of(__name__)

# A matrix product may take another path, and round otherwise, when its operand does not start where an allocation of its
# own would: every parameter starts at a multiple of this many bytes in its flat buffer.
_ALIGNMENT_BYTES = 64

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
_MARKS_PER_PIECE = 16


class Marks(NamedTuple):
    """Some elements of what a rank owns of a bucket: by their values writes are found that nobody counts."""

    read: Callable[[], Tensor]  # as integers: even NaN is equal to itself
    params: Sequence[Tensor]  # whose elements they are

    def changed_since(self, values: Tensor) -> set[Tensor]:
        """The parameters some of whose marked elements are not what they were."""
        changed = (values != self.read()).tolist()
        return {param for param, is_changed in zip(self.params, changed, strict=True) if is_changed}


class Sealed:
    """What some parameters were when their gather began.

    [Note: writes that come too early] Who reaches a parameter through its module or its optimizer waits for it, but a reference that
    somebody holds does not. What is written by it while the gather is under way is overwritten on some ranks and sent on by others.
    Autograd counts writes, and ours are all done when a gather begins: whoever waits first finds out. Writes by ``param.data``, NumPy and
    torch's fused optimizers are not counted, but as a rule change some of the marks, elements that this rank owns. Marks can be read
    where values are at hand on the host.
    """

    __slots__ = ("_marks", "_params", "_values", "_versions")

    def __init__(self, params: Sequence[Tensor], marks: Marks | None) -> None:
        self._params = params
        self._versions = list(map(version_of, params))
        self._marks = marks
        self._values = None if marks is None else marks.read()

    def written(self) -> set[Tensor]:
        """Those that were written since."""
        found = {p for p, before in zip(self._params, self._versions, strict=True) if version_of(p) != before}
        if self._marks is not None and self._values is not None and not torch.equal(self._values, self._marks.read()):
            found |= self._marks.changed_since(self._values)
        return found


class FlatBuffer:
    """Some parameters of one device and dtype in one buffer.

    Each has a storage of its own over its part of it: whoever saves or copies tensors takes those that share a storage for
    tied ones, and drops all but one of them, or takes the whole storage along with each.
    """

    def __init__(self, params: Sequence[Tensor], order: Sequence[int] | None = None, *, block: int = 1) -> None:
        """``order`` is that in which they lie in memory, by their places among ``params``; each begins at a multiple of ``block``."""
        self.params = params
        first = params[0] if params else torch.empty(0)  # a bucket may hold nothing of this optimizer
        step = lcm(_ALIGNMENT_BYTES // first.element_size(), block)
        order = range(len(params)) if order is None else order
        padded = (-(-params[place].numel() // step) * step for place in order)
        self._padded = list(accumulate(padded, initial=0))
        self._unpadded = list(accumulate((params[place].numel() for place in order), initial=0))
        start_of = dict(zip(order, self._padded, strict=False))
        self._starts = [*(start_of[place] for place in range(len(params))), self._padded[-1]]  # by place
        self.buffer = torch.zeros(self._starts[-1], dtype=first.dtype, device=first.device)
        can_cut = _can_cut_storages(first.device.type)
        for param, start in zip(params, self._starts, strict=False):
            if param.numel():
                memory = self.buffer[start:].as_strided(param.shape, strides_in_bucket(param))
                memory = _with_own_storage(memory) if can_cut else memory
            else:
                memory = self.buffer.new_empty(param.shape)
            param.data = memory.copy_(param.detach())
        # The first and the last parameter, and where they are: what moves parameters moves them all.
        self.ends = tuple((params[i], params[i].data_ptr()) for i in ((0, -1) if params else ()))

    def is_intact(self) -> bool:
        """Whether the parameters still live here."""
        return all(param.data_ptr() == address for param, address in self.ends)

    def positions(self, elements: Iterable[int]) -> list[int]:
        """Where elements, counted in the order of memory, lie in the buffer; padding goes with what stands before it."""
        return [self._position(element) for element in elements]

    def piece(self, place: int, start: int, stop: int) -> Tensor:
        """Elements of one parameter, in memory order."""
        return self.buffer[self._starts[place] + start : self._starts[place] + stop]

    def mark(self, pieces: Sequence[tuple[int, int, int]]) -> Marks | None:
        """Some elements of each piece, which is the place of a parameter, a start and a stop; None if there are none."""
        bits = _INTEGERS.get(self.buffer.element_size())
        places, params = [], []
        for place, start, stop in pieces:
            last = stop - start - 1
            if last >= 0:
                spread = sorted({start + last * i // _MARKS_PER_PIECE for i in range(_MARKS_PER_PIECE + 1)})
                places += [self._starts[place] + element for element in spread]
                params += [self.params[place]] * len(spread)
        if bits is None or not places:
            return None
        at = torch.tensor(places, device=self.buffer.device)
        return Marks(partial(torch.index_select, self.buffer.view(bits), 0, at), params)

    def _position(self, element: int) -> int:
        if element == self._unpadded[-1]:
            return self._padded[-1]
        number = bisect_right(self._unpadded, element) - 1
        return self._padded[number] + element - self._unpadded[number]

    def slice(self, first: int, last: int) -> Tensor:
        """The part of the buffer that holds parameters ``first`` to ``last - 1``, padding included, if they lie in their own order."""
        return self.buffer[self._starts[first] : self._starts[last]]


def _with_own_storage(view: Tensor) -> Tensor:
    """The same memory, without gaps, by a storage as large as the view, which keeps that of the whole alive."""
    start = view.storage_offset() * view.element_size()
    storage = view.untyped_storage()[start : start + view.nbytes]
    return view.new_empty(0).set_(storage, 0, view.shape, view.stride())


@cache
def _can_cut_storages(device_type: str) -> bool:
    """Whether a device takes a storage that begins inside of an allocation, found by trying it."""
    whole = torch.zeros(2, device=device_type)
    try:
        _with_own_storage(whole[1:]).fill_(1)
        if whole.tolist() == [0, 1]:
            return True
        reason: object = "what is written to a part does not show in the whole"
    except (RuntimeError, NotImplementedError) as error:
        reason = error
    logger.warning(
        "parameters on %s share one storage per bucket, because its storages cannot be cut (%s): clone the tensors of a "
        "state_dict() before you give it to a tool that looks for shared tensors, or saves one by one",
        device_type,
        reason,
    )
    return False
