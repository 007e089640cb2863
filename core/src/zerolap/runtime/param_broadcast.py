"""Updated parameters broadcast by their owners: how ranks get them without overlap. No updates here."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from zerolap.errors import CollectiveError
from zerolap.runtime.flat_buffer import FlatBuffer
from zerolap.runtime.shard_optimizer import ShardBook
from zerolap.schedule.ownership import GroupRank


class ParamBroadcast:
    """Sends what each rank owns to all others: parameter by parameter, or from one buffer per owner, device and dtype."""

    def __init__(self, book: ShardBook, group: dist.ProcessGroup, *, in_buffers: bool) -> None:
        self._book = book
        self._group = group
        self._in_buffers = in_buffers
        self._flats: list[tuple[GroupRank, FlatBuffer]] = []

    def lay_out(self) -> None:
        """Move the parameters into their buffers, if they are sent from buffers."""
        if not self._in_buffers:
            return
        alike: dict[tuple[GroupRank, torch.device, torch.dtype], list[Tensor]] = {}
        for param, owner in zip(self._book.params, self._book.owners.values(), strict=True):
            alike.setdefault((owner, param.device, param.dtype), []).append(param)
        self._flats = [(owner, FlatBuffer(params)) for (owner, _, _), params in alike.items()]

    def send(self) -> None:
        """Send each rank's parameters to all others, frozen ones too: one frozen after backward is still updated."""
        if self._group.size() == 1:
            return
        try:
            sent = [
                (self._group.broadcast(wire := memory.contiguous(), root=owner), wire, memory)
                for owner, memory in self._owned()
                if memory.numel()
            ]
            for work, wire, memory in sent:
                work.wait()
                if wire is not memory:
                    memory.copy_(wire)
        except Exception as error:
            raise CollectiveError(f"rank {dist.get_rank()}: broadcast of updated parameters failed: {error}") from error

    def _owned(self) -> Iterable[tuple[GroupRank, Tensor]]:
        if not self._in_buffers:
            params = self._book.params
            return [(owner, params[index].detach()) for index, owner in self._book.owners.items()]
        if not all(flat.is_intact() for _, flat in self._flats):
            self.lay_out()  # the model was moved or its parameters replaced
        return [(owner, flat.buffer) for owner, flat in self._flats]
