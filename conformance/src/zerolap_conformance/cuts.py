"""Where a parameter may be cut so that stepping its pieces is bitwise stepping the whole: tried, on one device and this many threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise, product

import torch
from torch import Tensor, nn

from zerolap._torch import devices_with_fused_kernels

Maker = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
CUTS = tuple(2**n for n in range(13))
NUM_ELEMENTS = (10_007, 3001)


def makers(device: torch.device) -> dict[str, Maker]:
    """torch's optimizers, in each implementation that the device has."""
    found: dict[str, Maker] = {
        "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
        "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
        "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
    }
    if device.type in devices_with_fused_kernels():
        found["fused SGD"] = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True)
        found["fused AdamW"] = lambda params: torch.optim.AdamW(params, lr=0.01, fused=True)
    return found


def dtypes_of(device: torch.device) -> Iterator[torch.dtype]:
    """Those that the device steps."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        try:
            (torch.ones(2, dtype=dtype, device=device) * 2).sum().item()
        except Exception:  # whatever a device says of a dtype that it does not have
            continue
        yield dtype


def stepped(
    make: Maker, device: torch.device, numel: int, cuts: list[int], dtype: torch.dtype, *, num_steps: int = 5
) -> tuple[Tensor, Tensor]:
    """A parameter that was stepped whole, and one that was stepped in pieces."""
    dice = torch.Generator().manual_seed(0)
    start = torch.randn(numel, generator=dice).to(dtype)
    gradients = [torch.randn(numel, generator=dice).to(dtype) for _ in range(num_steps)]
    results = []
    for ends in ([0, numel], [0, *cuts, numel]):
        memory = start.clone().to(device)
        params = [nn.Parameter(memory[a:b]) for a, b in pairwise(ends)]
        optimizer = make(params)
        for gradient in gradients:
            for param, (a, b) in zip(params, pairwise(ends), strict=True):
                param.grad = gradient[a:b].to(device, copy=True)
            optimizer.step()
        results.append(memory)
    return results[0], results[1]


def is_exact(device: torch.device, cut: int) -> bool:
    """Whether cuts at multiples of this many elements change nothing, for every optimizer and dtype that is tried."""
    for make, dtype, numel in product(makers(device).values(), dtypes_of(device), NUM_ELEMENTS):
        for at in {cut, 3 * cut, 5 * cut, numel // 2 // cut * cut}:
            if 0 < at < numel:
                whole, pieces = stepped(make, device, numel, [at], dtype, num_steps=2)
                if not torch.equal(whole, pieces):
                    return False
    return True


def smallest_cut(device: torch.device) -> int | None:
    """The smallest power of two that is exact."""
    return next((cut for cut in CUTS if is_exact(device, cut)), None)
