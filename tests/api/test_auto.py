"""``schedule="auto"``: whatever is tried, the numbers are those of DDP + the plain optimizer, and all ranks end with the same."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support.ranks import on_ranks
from support.versions import needs_ddp_option
from zerolap_conformance.ranks import run_ranks
from zerolap_cpu_gloo import CpuGlooAdapter

WIDTH, NUM_LAYERS = 64, 12
MOST_ITERATIONS = 120


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))


def _batch(iteration: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * iteration + dist.get_rank()))


def _pair(ddp_options: dict[str, Any], options: dict[str, Any]) -> tuple[list[tuple[DDP, Any]], zerolap.Handle]:
    plain, ddp = (DDP(_model(), **ddp_options) for _ in range(2))
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-2, overlap_with_ddp=True)
    handle = zerolap.attach(ddp, zero, schedule="auto", **options)
    return [(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)), (ddp, zero)], handle


def _same(both: list[tuple[DDP, Any]]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(*(ddp.parameters() for ddp, _ in both), strict=True))


def _tune(ddp_options: dict[str, Any], options: dict[str, Any]) -> tuple[int, str, str, list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerolap.auto").addHandler(handler)
    logging.getLogger("zerolap.auto").setLevel(logging.INFO)
    both, handle = _pair(ddp_options, options)
    for iteration in range(MOST_ITERATIONS):
        for ddp, optimizer in both:
            optimizer.zero_grad()
            if iteration or not ddp.static_graph:  # which cannot begin without synchronisation
                with ddp.no_sync():
                    ddp(_batch(2 * iteration)).square().mean().backward()
            ddp(_batch(2 * iteration + 1)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                ddp(_batch(iteration))  # an evaluation, which is no iteration
        handle.finish()
        assert _same(both), f"iteration {iteration} differs"
        if handle.is_tuned:
            break
    return iteration, handle.schedule, handle.gather, said


@pytest.mark.parametrize(
    ("ddp_options", "options", "num_choices"),
    [
        ({"bucket_cap_mb": 0.02}, {}, 8),
        ({"bucket_cap_mb": 0.02, "gradient_as_bucket_view": True, "static_graph": True}, {}, 4),
        ({"bucket_cap_mb": 0.02, "find_unused_parameters": True}, {"gather": "lazy"}, 4),
        ({"bucket_cap_mb": 0.02}, {"nonfinite": "raise", "gather": "eager"}, 2),
        pytest.param(  # sizes that somebody chose one by one stay
            {"bucket_cap_mb_list": [0.01, 0.02, 0.05]}, {}, 4, marks=needs_ddp_option("bucket_cap_mb_list")
        ),
    ],
)
def test_every_try_is_an_update_like_any_other(
    ddp_options: dict[str, Any], options: dict[str, Any], num_choices: int
) -> None:
    results = run_ranks(2, _tune, ddp_options, options)
    iterations, schedule, gather, said = results[0]
    assert iterations < MOST_ITERATIONS - 1
    assert all(result[:3] == (iterations, schedule, gather) for result in results), "all ranks choose the same"
    (line,) = said
    assert f"auto has chosen {schedule} {gather}" in line
    assert 1 <= line.count(" ms") <= num_choices
    may_rebucket = not ddp_options.keys() & {"static_graph", "bucket_cap_mb_list"}
    assert ("foreseen milliseconds by bucket size: " in line) == may_rebucket
    if "nonfinite" in options:
        assert schedule == "after_backward"
    if "gather" in options:
        assert gather == options["gather"]
    assert [result[3] for result in results[1:]] == [[]], "one rank tells"


@on_ranks(2)
def test_what_is_compiled_is_never_gathered_lazily() -> None:
    both, handle = _pair({}, {})
    runs = [(torch.compile(ddp, backend="eager"), optimizer) for ddp, optimizer in both]
    for iteration in range(MOST_ITERATIONS):
        for run, optimizer in runs:
            optimizer.zero_grad()
            run(_batch(iteration)).square().mean().backward()
            optimizer.step()
        assert handle.gather == "eager", iteration
        assert _same(both)
        if handle.is_tuned:
            return
    raise AssertionError("never tuned")


@on_ranks(2)
def test_join_is_refused_until_it_is_tuned() -> None:
    both, _ = _pair({}, {})
    ddp, zero = both[1]

    def train() -> None:
        with Join([ddp]):
            for iteration in range(2):
                zero.zero_grad()
                ddp(_batch(iteration)).square().mean().backward()

    with pytest.raises(RuntimeError, match=r"train without Join until handle\.is_tuned"):
        train()


@on_ranks(2)
def test_a_copy_is_not_tuned_and_detach_ends_it() -> None:
    both, handle = _pair({}, {})
    ddp, zero = both[1]
    for iteration in range(3):
        zero.zero_grad()
        ddp(_batch(iteration)).square().mean().backward()
        zero.step()
    handle.finish()
    theirs = copy.deepcopy(ddp.module)(_batch(0))
    handle.detach()
    assert torch.equal(theirs, ddp.module(_batch(0)))
    assert handle.is_tuned


class _SetClock(CpuGlooAdapter):
    """Its time goes on when the test says so. Spans take no time, so there is no forecast, and sizes are tried by guess."""

    now = 0.0

    def moment(self) -> float:
        return self.now


@pytest.mark.parametrize("num_slow", [0, 38])
@on_ranks(2)
def test_a_slow_phase_while_it_tries_does_not_decide(num_slow: int) -> None:
    """Buckets of 0.02 MB are the fastest of those tried, but the first iterations of all take longer by 15 %."""
    adapter = _SetClock()
    both, handle = _pair({"bucket_cap_mb": 0.02}, {"adapter": adapter})
    ddp, zero = both[1]
    seconds = {0.02: 1.0, 25.0: 1.1, 5.0: 1.3}
    for iteration in range(2 * MOST_ITERATIONS):
        zero.zero_grad()
        ddp(_batch(iteration)).square().mean().backward()
        zero.step()
        if handle.is_tuned:
            assert round(ddp.bucket_bytes_cap / 2**20, 2) == 0.02, ddp.bucket_bytes_cap
            return
        adapter.now += seconds[round(ddp.bucket_bytes_cap / 2**20, 2)] * (1.15 if iteration < num_slow else 1)
    raise AssertionError("never tuned")


@on_ranks(2)
def test_what_needs_step_is_refused() -> None:
    with pytest.raises(ValueError, match='schedule="on_step"'):
        _pair({}, {"nonfinite": "skip"})
