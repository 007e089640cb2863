"""The bare backend, before there is any adapter: what of torch.distributed works with it, and who needs that. No verdict is given."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zerolap import Adapter, Capabilities
from zerolap._torch import coalescing
from zerolap_conformance.ranks import try_ranks
from zerolap_conformance.support import device_of, expect_equal

Trial = Callable[[torch.device], None]


class Need(NamedTuple):
    what: str
    needed_by: str
    trial: Trial


class Found(NamedTuple):
    """How one of them came out; ``error`` is None if it works."""

    what: str
    needed_by: str
    error: str | None


def _mine(device: torch.device, numel: int = 6) -> Tensor:
    return torch.arange(float(numel), device=device) + dist.get_rank()


def _sum(numel: int = 6) -> Tensor:
    size = dist.get_world_size()
    return torch.arange(float(numel)) * size + size * (size - 1) / 2


def _all_reduce(device: torch.device) -> None:
    x = _mine(device)
    dist.all_reduce(x)
    expect_equal(x, _sum(), "the sum")


def _maximum(device: torch.device) -> None:
    x = _mine(device)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    expect_equal(x, torch.arange(6.0) + dist.get_world_size() - 1, "the maximum")


def _broadcast(device: torch.device) -> None:
    x = _mine(device)
    dist.broadcast(x, src=dist.get_world_size() - 1)
    expect_equal(x, torch.arange(6.0) + dist.get_world_size() - 1, "what was broadcast")


def _reduce(device: torch.device) -> None:
    x = _mine(device)
    dist.reduce(x, dst=0)
    if dist.get_rank() == 0:
        expect_equal(x, _sum(), "the sum")


def _gather_into(device: torch.device) -> None:
    size = dist.get_world_size()
    out = torch.zeros(6 * size, device=device)
    dist.all_gather_into_tensor(out, _mine(device))
    expect_equal(out, torch.cat([torch.arange(6.0) + r for r in range(size)]), "what was gathered")


def _scatter(device: torch.device) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    out = torch.zeros(6, device=device)
    dist.reduce_scatter_tensor(out, _mine(device, 6 * size))
    expect_equal(out, _sum(6 * size)[6 * rank : 6 * rank + 6], "the sum")


def _exchange(device: torch.device) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    out = torch.zeros(6, device=device)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, _mine(device), (rank + 1) % size),
            dist.P2POp(dist.irecv, out, (rank - 1) % size),
        ]
    )
    for work in works:
        work.wait()
    expect_equal(out, torch.arange(6.0) + (rank - 1) % size, "what was sent")


def _future(device: torch.device) -> None:
    x = _mine(device)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    y = work.get_future().then(lambda future: future.value()[0] * 2).wait()
    expect_equal(y, _sum() * 2, "what a callback made of the sum")


def _all_to_all(device: torch.device) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    out = torch.zeros(size, device=device)
    dist.all_to_all_single(out, torch.arange(float(size), device=device) + 10 * rank)
    expect_equal(out, 10 * torch.arange(float(size)) + rank, "what all have sent")


def _coalesced(device: torch.device) -> None:
    tensors = [_mine(device), _mine(device, 3)]
    with coalescing(device=device):
        for x in tensors:
            dist.all_reduce(x)
    for x in tensors:
        expect_equal(x, _sum(x.numel()), "a sum of several")


NEEDS = (
    Need("all_reduce, SUM", "DDP, zerolap", _all_reduce),
    Need("all_reduce, MAX", "zerolap", _maximum),
    Need("broadcast", "DDP, zerolap", _broadcast),
    Need("a work's future, and its then()", "DDP, zerolap", _future),
    Need("all_gather_into_tensor (_allgather_base)", "zerolap on streams, FSDP", _gather_into),
    Need("reduce_scatter_tensor (_reduce_scatter_base)", "zerolap on streams, FSDP", _scatter),
    Need("reduce", "zerolap, for parts of different length", _reduce),
    Need("all_to_all_single", "zerolap's rounded exchanges", _all_to_all),
    Need("batch_isend_irecv", "pipelines", _exchange),
    Need("coalescing", "FSDP, functional collectives", _coalesced),
)


class _Bare(Adapter):
    """Names, and no more: what is tried is the backend's."""

    name = "bare"
    capabilities = Capabilities(
        futures_complete_at_enqueue=False, exact_cut=1, has_float64=False, one_issue_order=False
    )

    def __init__(self, device_type: str, backend: str) -> None:
        self.device_type, self.backend = device_type, backend

    def device(self, local_rank: int) -> torch.device:
        if self._is_host:
            return torch.device("cpu")
        module = getattr(torch, self.device_type)
        return torch.device(self.device_type, min(local_rank, module.device_count() - 1))


def adapter() -> Adapter:
    """Made on a rank, of what ``try_backend`` was asked for."""
    device_type, backend, module = os.environ[_ASKED].split(",")
    if module:
        importlib.import_module(module)
    return _Bare(device_type, backend)


def _try(made: Adapter, what: str) -> None:
    (need,) = (each for each in NEEDS if each.what == what)
    need.trial(device_of(made))


_ASKED = "ZEROLAP_BARE_BACKEND"


def try_backend(device_type: str, backend: str, *, module: str | None, num_ranks: int) -> list[Found]:
    """Each on ranks of its own, so that what fails or hangs tells nothing of the next."""
    os.environ[_ASKED] = f"{device_type},{backend},{module or ''}"  # before ranks are started
    found = []
    for need in NEEDS:
        outcomes = try_ranks(
            num_ranks, _try, need.what, adapter="zerolap_conformance.bare:adapter", limit=30, group_timeout=15
        )
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        found.append(Found(need.what, need.needed_by, errors[0].strip().splitlines()[-1] if errors else None))
    return found
