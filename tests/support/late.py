"""An adapter whose gathers arrive as late as they may: whoever does not wait sees old values, always."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from zerolap.backend.lanes import Pending
from zerolap.backend.parts import Parts
from zerolap_cpu_gloo import CpuGlooAdapter


class Late(CpuGlooAdapter):
    """Nothing arrives before it is waited for."""

    def all_gather(self, parts: Parts, **options: Any) -> Pending:
        wire = torch.cat(parts.tensors)
        ends = [0, *itertools.accumulate(part.numel() for part in parts.tensors)]
        pending = super().all_gather(Parts.cut(wire, ends), **options)

        def arrive() -> None:
            received = wire.split([part.numel() for part in parts.tensors])
            for rank, (part, sent) in enumerate(zip(parts.tensors, received, strict=True)):
                if rank != options["group"].rank():
                    part.copy_(sent)

        return Pending([pending], tensors=(wire,), what="", sent_bytes=pending.sent_bytes, finish=arrive)
