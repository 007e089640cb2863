"""Rounding tensors to messages of fewer bits, and adding messages up. Nothing is sent here.

[Note: rounding] A block of elements shares a scale, which is its largest magnitude by the largest number of the format. So

* the error of an element is at most half a step of its block (int8: 1/254 of the largest magnitude there), and does not grow with n;
* a block of zeros has the smallest normal scale, not zero, and decodes to zeros. So does what is smaller than that, which is lost;
* a block with a NaN or an infinity gets a scale that is not finite, and decodes to nothing finite: it is found wherever one looks, and
  nobody has to look here.

Blocks begin where a parameter begins, and none has elements of two: how something is rounded does not depend on buckets or on owners.
Decoding multiplies, then adds: two operations, each rounded as IEEE 754 says, so ranks get the same bits whatever vector unit, chunk or
thread does it. A fused multiply-add would not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from zerolap._torch import foreach_copy_
from zerolap.schedule.wire_format import BLOCK, WireFormat, in_blocks

# Elements that go through all operations before the next ones do: on a host they stay in its caches, which makes rounding 2 to 4 times as
# fast. A device takes all at once.
CACHED = 2**16

_SENT_AS = {WireFormat.INT8: torch.int8, WireFormat.FP8: torch.float8_e4m3fn, WireFormat.BF16: torch.bfloat16}
_LARGEST = {WireFormat.INT8: 127.0, WireFormat.FP8: 448.0}
# Of an integer hash that every device computes alike: generators are not the same on all of them, and some have none.
_SPREAD, _MIX = -1640531527, ((16, 2146121005), (15, -2073254261))


class Noise:
    """Numbers from 0 to 1 that depend on a key and on a block only: the same however the work is cut, and after a resume."""

    def __init__(self, key: tuple[int, ...], blocks: Tensor) -> None:
        """``blocks`` has a number for each block of a message, of 32 bits."""
        self._key = word_of(*key)
        self._blocks = blocks

    def add_to(self, work: Tensor, blocks: slice) -> Tensor:
        """Add one to each element of these blocks."""
        within = torch.arange(BLOCK, dtype=torch.int32, device=work.device)
        bits = torch.add(within, self._blocks[blocks].unsqueeze(1), alpha=BLOCK)
        bits.mul_(_SPREAD).bitwise_xor_(self._key)
        for shift, factor in _MIX:
            bits.bitwise_xor_(bits >> shift).mul_(factor)
        bits.bitwise_xor_(bits >> 16).bitwise_and_(2**24 - 1)
        return work.view(-1, BLOCK).add_(bits, alpha=2.0**-24)


def word_of(*key: int) -> int:
    """A number of 32 bits, with a sign, for a key."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=4).digest(), "little", signed=True)


class Blocks:
    """Ranges of memory, each a part of a parameter, as if every one took whole blocks; what fills up the last one is zero."""

    def __init__(self, memory: Tensor, ranges: Sequence[tuple[int, int]], *, at_once: int | None) -> None:
        """``at_once`` is how many elements are read together, whole blocks of them; None for all."""
        sizes = [in_blocks(stop - start) for start, stop in ranges]
        self.numel = sum(sizes)
        self.at_once = min(self.numel, at_once or self.numel)
        self._copied_to: list[list[tuple[int, int]]] = [[] for _ in self.starts()]
        self._copied: list[list[Tensor]] = [[] for _ in self._copied_to]
        for (start, stop), place in zip(ranges, accumulate(sizes, initial=0), strict=False):
            end = place + stop - start
            while place < end:
                number = place // self.at_once
                until = min(end, (number + 1) * self.at_once)
                self._copied_to[number].append((place - number * self.at_once, until - number * self.at_once))
                self._copied[number].append(memory[stop - (end - place) : stop - (end - until)])
                place = until

    def starts(self) -> range:
        return range(0, self.numel, self.at_once or 1)

    def read(self, start: int, into: Tensor) -> Tensor:
        """What begins there, as much as ``into`` can take: that memory, or as it lies."""
        number = start // self.at_once
        places, found = self._copied_to[number], self._copied[number]
        if len(places) == 1 and found[0].numel() == into.numel() and found[0].dtype is into.dtype:
            return found[0]
        if sum(each.numel() for each in found) < into.numel():
            into.zero_()
        foreach_copy_([into[a:b] for a, b in places], found)
        return into


class _Span(NamedTuple):
    start: int
    stop: int

    @property
    def blocks(self) -> slice:
        return slice(self.start // BLOCK, self.stop // BLOCK)


class Codec:
    """Encodes and decodes whole blocks in one format, kept in one dtype."""

    def __init__(self, form: WireFormat, *, kept_as: torch.dtype, at_once: int | None) -> None:
        """``at_once`` is how many elements go through all operations together, whole blocks of them; None for all."""
        self.form = form
        self.computes_in = torch.float64 if kept_as is torch.float64 else torch.float32
        self.at_once = at_once
        self._sent_as = _SENT_AS[form]

    def num_bytes(self, numel: int) -> int:
        return self.form.num_bytes(numel, scale_itemsize=self.computes_in.itemsize)

    def encode(self, given: Blocks, message: Tensor, *, owed: Tensor | None = None, noise: Noise | None = None) -> None:
        """Round to the bytes of a message. What is ``owed`` is added before, and set to what is rounded off; nothing where that is not finite."""
        exact, work = (self._scratch(given.numel, message) for _ in range(2))
        for span in self._spans(given.numel):
            size = span.stop - span.start
            values = given.read(span.start, exact[:size])
            if owed is not None:
                values = torch.add(values, owed[span.start : span.stop], out=exact[:size])
            self._write(values, message, given.numel, span, work[:size], noise)
            if owed is not None:
                rest = torch.sub(values, self._decode(message, given.numel, span, work[:size]), out=work[:size])
                owed[span.start : span.stop] = rest.nan_to_num_(0.0, 0.0, 0.0)

    def encode_difference(self, exact: Tensor, known: Tensor, message: Tensor, *, noise: Noise | None = None) -> None:
        """Round what ``exact`` has more than ``known`` to the bytes of a message."""
        difference, work = (self._scratch(exact.numel(), message) for _ in range(2))
        for span in self._spans(exact.numel()):
            start, stop = span
            values = torch.sub(exact[start:stop], known[start:stop], out=difference[: stop - start])
            self._write(values, message, exact.numel(), span, work[: stop - start], noise)

    def add(self, message: Tensor, to: Tensor) -> None:
        """Add what a message says."""
        work = self._scratch(to.numel(), message)
        for span in self._spans(to.numel()):
            to[span.start : span.stop].add_(self._decode(message, to.numel(), span, work[: span.stop - span.start]))

    def mean(self, messages: Sequence[Tensor], into: Tensor) -> None:
        """The mean of what messages say, added up in their order."""
        work = self._scratch(into.numel(), into)
        for span in self._spans(into.numel()):
            total = into[span.start : span.stop]
            self._decode(messages[0], into.numel(), span, total)
            for message in messages[1:]:
                total.add_(self._decode(message, into.numel(), span, work[: span.stop - span.start]))
            if len(messages) > 1:
                total.mul_(1 / len(messages))

    def _write(
        self, values: Tensor, message: Tensor, numel: int, span: _Span, work: Tensor, noise: Noise | None
    ) -> None:
        scales, sent = self._views(message, numel, span)
        if self.form is WireFormat.BF16:
            sent.copy_(values)
            return
        blocks, largest = work.view(-1, BLOCK), _LARGEST[self.form]
        torch.abs(values, out=work)
        torch.amax(blocks, 1, out=scales)
        scales.div_(largest).clamp_(min=torch.finfo(self.computes_in).tiny)
        torch.div(values.view(-1, BLOCK), scales.unsqueeze(1), out=blocks)
        if self.form is WireFormat.INT8 and noise is None:
            work.round_()
        elif self.form is WireFormat.INT8 and noise is not None:
            noise.add_to(work, span.blocks).floor_().clamp_(-largest, largest)
        sent.copy_(work)  # which rounds to fp8

    def _decode(self, message: Tensor, numel: int, span: _Span, into: Tensor) -> Tensor:
        scales, sent = self._views(message, numel, span)
        if self.form is WireFormat.INT8:
            torch.mul(sent.view(-1, BLOCK), scales.unsqueeze(1), out=into.view(-1, BLOCK))
        else:
            into.copy_(sent)
            if self.form.has_scales:
                into.view(-1, BLOCK).mul_(scales.unsqueeze(1))
        return into

    def _views(self, message: Tensor, numel: int, span: _Span) -> tuple[Tensor, Tensor]:
        """The scales of a span, and what is sent of it, in the bytes of a message of so many elements."""
        size, scale_size = self._sent_as.itemsize, self.computes_in.itemsize
        begin = self.form.num_scales(numel) * scale_size
        first, last = (
            (span.blocks.start * scale_size, span.blocks.stop * scale_size) if self.form.has_scales else (0, 0)
        )
        sent = message[begin + span.start * size : begin + span.stop * size]
        return message[first:last].view(self.computes_in), sent.view(self._sent_as)

    def _scratch(self, numel: int, like: Tensor) -> Tensor:
        return torch.empty(min(numel, self.at_once or numel), dtype=self.computes_in, device=like.device)

    def _spans(self, numel: int) -> Iterator[_Span]:
        assert numel % BLOCK == 0, "messages have whole blocks"
        for start in range(0, numel, self.at_once or numel or 1):
            yield _Span(start, min(numel, start + (self.at_once or numel)))
