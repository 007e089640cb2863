"""Exchanges in fewer bits: gradients to the owners of their parts, and differences of parameters from their owners to all. See codec.

[Note: error feedback] An owner steps exact values, the masters, in its shard, and what all ranks have is the sum of all differences ever
sent. The next difference is that of the exact value from that sum, so whatever rounding took away goes with it, and takes no memory
beyond the masters: 1/n of the parameters. Owners add what they have sent to their own copy as all others do, so copies are equal.

Gradients are all rounded, those that an owner has itself as well: what comes out does not depend on who owns what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from zerolap.backend.lanes import Pending
from zerolap.backend.parts import Parts
from zerolap.runtime.codec import Blocks, Codec, Noise
from zerolap.schedule.ownership import Piece
from zerolap.schedule.wire_format import in_blocks

AllToAll = Callable[[Parts, Parts], Pending]


class Masters:
    """Exact values of what a rank owns of a flat buffer, laid out as there."""

    def __init__(self, buffer: Tensor, ranges: Sequence[tuple[int, int]], *, dtype: torch.dtype) -> None:
        self.ranges = ranges
        self.memory = [buffer[start:stop].to(dtype, copy=True) for start, stop in ranges]

    def of(self, view: Tensor) -> Tensor:
        """What stands for a part of the buffer."""
        first, last = view.storage_offset(), view.storage_offset() + view.numel()
        for (start, stop), memory in zip(self.ranges, self.memory, strict=True):
            if start <= first and last <= stop:
                return memory[first - start : last - start]
        assert not view.numel(), "a rank has masters of all that it owns"
        return self.memory[0][:0]


class Differences:
    """What all ranks send of one bucket's parameters: a message each for every section."""

    def __init__(
        self, codec: Codec, buffer: Tensor, sections: Sequence[Sequence[int]], masters: Masters, *, rank: int
    ) -> None:
        """``sections`` says where ranks' parts of each section begin in the buffer, and where the last one ends."""
        self._codec = codec
        self._buffer = buffer
        self._masters = masters
        self._rank = rank
        self._parts = [[buffer[a:b] for a, b in pairwise(ends)] for ends in sections]
        sizes = [[codec.num_bytes(part.numel()) for part in parts] for parts in self._parts]
        begins = accumulate((sum(of_section) for of_section in sizes), initial=0)
        self.ends = [list(accumulate(of, initial=begin)) for begin, of in zip(begins, sizes, strict=False)]

    def message(self, noise: Sequence[Noise | None] = ()) -> Tensor:
        """Memory for all messages, with this rank's own in its place; ``noise`` has that of each section."""
        made = torch.empty(self.ends[-1][-1] if self.ends else 0, dtype=torch.uint8, device=self._buffer.device)
        for number, (parts, ends) in enumerate(zip(self._parts, self.ends, strict=True)):
            own = made[ends[self._rank] : ends[self._rank + 1]]
            exact, known = self._masters.memory[number], parts[self._rank]
            self._codec.encode_difference(exact, known, own, noise=noise[number] if noise else None)
        return made

    def apply(self, message: Tensor) -> None:
        """Add all messages to the parameters, our own as well: every rank must have the rounded value."""
        for parts, ends in zip(self._parts, self.ends, strict=True):
            for part, (start, stop) in zip(parts, pairwise(ends), strict=True):
                self._codec.add(message[start:stop], part)


class QuantisedReduce:
    """The reduction of one bucket: a message to the owner of every part, who adds up."""

    def __init__(
        self,
        codec: Codec,
        given: Sequence[Blocks],
        into: Tensor,
        *,
        rank: int,
        start: AllToAll,
        owed: Tensor | None = None,
    ) -> None:
        """``given`` are the gradients by owner; what is ``owed`` lies in their order, all parts one behind the other."""
        self._codec = codec
        self._given = given
        self._into = into
        self._rank = rank
        self._start = start
        num_bytes = [codec.num_bytes(part.numel) for part in given]
        self._sent_ends = list(accumulate((0 if to == rank else n for to, n in enumerate(num_bytes)), initial=0))
        of_others = (0 if source == rank else num_bytes[rank] for source in range(len(given)))
        self._received_ends = list(accumulate(of_others, initial=0))
        self._own_bytes = num_bytes[rank]
        self._owed = [None] * len(given) if owed is None else torch.split(owed, [part.numel for part in given])

    def scatter(self, noise: Sequence[Noise | None] = ()) -> Pending:
        """Start it; ``noise`` has that of each part."""
        device, me = self._into.device, self._rank
        sent = Parts.cut(torch.empty(self._sent_ends[-1], dtype=torch.uint8, device=device), self._sent_ends)
        memory = torch.empty(self._received_ends[-1] + self._own_bytes, dtype=torch.uint8, device=device)
        received = Parts.cut(memory[: self._received_ends[-1]], self._received_ends)
        messages = list(received.tensors)
        messages[me] = memory[self._received_ends[-1] :]  # which stays here
        for to, (part, message) in enumerate(zip(self._given, sent.tensors, strict=True)):
            into = messages[me] if to == me else message
            self._codec.encode(part, into, owed=self._owed[to], noise=noise[to] if noise else None)
        is_alone = len(messages) == 1
        pending = Pending((), tensors=(), what="") if is_alone else self._start(sent, received)
        add_up = partial(self._codec.mean, messages, self._into)
        # The one inside says what failed.
        return Pending([pending], tensors=(sent, messages), what="", sent_bytes=pending.sent_bytes, finish=add_up)


class Owed:
    """What was rounded off this rank's gradients and is sent with the next ones: by parameter, for buckets may change."""

    def __init__(self) -> None:
        self._ranges: dict[int, list[tuple[int, Tensor]]] = {}  # where each starts in its parameter

    def laid_out(self, pieces: Sequence[Piece], *, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory for these, each in whole blocks, with what is owed until now; together they are whole parameters."""
        sizes = [in_blocks(piece.stop - piece.start) for piece in pieces]
        memory = torch.zeros(sum(sizes), dtype=dtype, device=like.device)
        found: dict[int, list[tuple[int, Tensor]]] = {}
        for (param, start, stop), place in zip(pieces, accumulate(sizes, initial=0), strict=False):
            mine = memory[place : place + stop - start]
            for first, before in self._ranges.get(param, ()):
                a, b = max(first, start), min(first + before.numel(), stop)
                if a < b:
                    mine[a - start : b - start] = before[a - first : b - first]
            found.setdefault(param, []).append((start, mine))
        self._ranges.update(found)
        return memory
