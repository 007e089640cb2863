"""Audits: do all ranks have the same parameters, to the last bit? Checksums, and who differs. No collectives here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def checksums(tensors: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """One integer for each tensor: the sum of its bits, read as whole numbers."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64, device=device)
    return torch.stack([_words(tensor).sum(dtype=torch.int64) for tensor in tensors])


def _words(tensor: Tensor) -> Tensor:
    bits = tensor.detach().contiguous().view(-1).view(torch.uint8)
    is_even = bits.numel() % 8 == 0 and bits.storage_offset() % 8 == 0
    return bits.view(torch.int64) if is_even else bits


def describe_drift(names: Sequence[str], said: Sequence[tuple[str, Sequence[int]]]) -> str:
    """What differs, given every rank's name and its checksums of the parameters called ``names``."""
    for place, name in enumerate(names):
        sides: dict[int, list[str]] = {}
        for rank, sums in said:
            sides.setdefault(sums[place], []).append(rank)
        if len(sides) == 1:
            continue
        *few, most = sorted(sides.values(), key=len)
        minority = ", ".join(rank for side in few for rank in side)
        if len(few[-1]) == len(most):
            return (
                f"{name} differs between {' and '.join(map(', '.join, sorted(sides.values())))}: no side is the larger"
            )
        return f"{name} of {minority} differs from that of the {len(most)} others"
    return "parameters differed a moment ago, and no longer do"
