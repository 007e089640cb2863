"""Forecasts: closed forms where there are any, monotony, torch's buckets, and the bytes and states that real ranks count."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support.training import SMALL_BUCKETS, Mlp, backward, batches
from support.versions import NEEDS_MUON
from zerolap.calibrate.calibrate import Measured, calibrate, measure
from zerolap.calibrate.from_model import workload_of
from zerolap.calibrate.model_params import ModelParam, describe, shared_out
from zerolap.forecast.forecast import Compute, Forecast, Link, Pattern, forecast, forecast_all, forecast_ddp, recommend
from zerolap.forecast.workload import MB, Param, Workload, balance_of, bucketize, sent_bytes, sharded_memory, traffic_of
from zerolap.runtime.flat_buffer import FlatBuffer
from zerolap.runtime.precision import Precision
from zerolap.schedule.machine import Agreement, Gather, Schedule
from zerolap.schedule.ownership import GroupRank
from zerolap_conformance.ranks import run_ranks
from zerolap_cpu_gloo import CpuGlooAdapter
from zerolap_cpu_gloo.adapter import bytes_of_gather, stage_sizes, stages_of

WAYS = list(product(Schedule, Gather))
NUMEL = 64 * 1024  # of a layer
IDLE = Compute(forward=0.0, backward=0.0)


def layers(num: int, *, numel: int = NUMEL, per_bucket: int = 1, **changes: Any) -> Workload:
    """Equal layers, used one after the other, in buckets of so many."""
    params = tuple(Param(numel, used_at=i / num, ready_at=(num - i) / num, cut=64) for i in range(num))
    return replace(Workload(params=params, layout=bucketize(params, cap_bytes=4 * numel * per_bucket)), **changes)


def seconds(workload: Workload, schedule: Schedule, gather: Gather, **given: Any) -> float:
    link, compute = given.pop("link", Link(bytes_per_second=math.inf)), given.pop("compute", IDLE)
    options = {"world_size": 4} | given
    return forecast(workload, link=link, compute=compute, schedule=schedule, gather=gather, **options).step_seconds


# --- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "gather"), WAYS)
@pytest.mark.parametrize("num_layers", [1, 7])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_without_computing_a_step_takes_its_bytes_at_the_rate_of_the_wire(
    schedule: Schedule, gather: Gather, num_layers: int, size: int
) -> None:
    workload = layers(num_layers)
    num_bytes = 2 * 4 * workload.numel * (size - 1) / size
    taken = seconds(workload, schedule, gather, world_size=size, link=Link(bytes_per_second=1e9))
    assert taken == pytest.approx(num_bytes / 1e9, rel=1e-9)
    plain = forecast_ddp(workload, world_size=size, link=Link(bytes_per_second=1e9), compute=IDLE)
    assert plain.step_seconds == pytest.approx(num_bytes / 1e9, rel=1e-9)
    assert plain.wire_seconds == pytest.approx(plain.step_seconds)
    assert plain.sent_bytes == num_bytes


@pytest.mark.parametrize(("schedule", "gather"), WAYS)
def test_with_an_infinitely_fast_link_a_step_takes_computing_and_the_update_of_a_shard(
    schedule: Schedule, gather: Gather
) -> None:
    workload = layers(6)
    compute = Compute(forward=0.1, backward=0.2, step_seconds_per_element=1e-6)
    update = workload.numel / 4 * 1e-6
    assert seconds(workload, schedule, gather, compute=compute) == pytest.approx(0.3 + update, rel=1e-9)
    plain = forecast_ddp(workload, world_size=4, link=Link(bytes_per_second=math.inf), compute=compute)
    assert plain.step_seconds == pytest.approx(0.3 + 4 * update, rel=1e-9)
    assert plain.exposed_seconds == pytest.approx(0, abs=1e-9)


def test_with_a_second_core_updates_inside_backward_are_hidden_but_the_last() -> None:
    workload, last = layers(6), NUMEL / 4 * 1e-6
    compute = Compute(forward=0.1, backward=6.0, step_seconds_per_element=1e-6, cores=2)
    taken = seconds(workload, Schedule.INTERLEAVED, Gather.EAGER, compute=compute)
    assert taken == pytest.approx(6.1 + last, rel=1e-9)
    assert seconds(workload, Schedule.ON_STEP, Gather.EAGER, compute=compute) == pytest.approx(6.1 + 6 * last, rel=1e-9)


@pytest.mark.parametrize("size", [1, 4])
def test_what_costs_nothing_takes_no_time(size: int) -> None:
    found = forecast_all(layers(3), world_size=size, link=Link(bytes_per_second=math.inf), compute=IDLE)
    assert [each.step_seconds for each in found] == [0.0] * 7
    assert recommend(found).best.schedule is Schedule.INTERLEAVED


@pytest.mark.parametrize("num_layers", [1, 5])
def test_latency_alone_is_that_of_a_reduction_and_a_gather(num_layers: int) -> None:
    compute, workload = Compute(forward=1.0, backward=2.0), layers(num_layers)
    for pattern, size, steps in ((Pattern.STAGED, 8, 1), (Pattern.STAGED, 64, 2), (Pattern.RING, 8, 7)):
        link = Link(bytes_per_second=math.inf, latency=0.01, pattern=pattern, stage_sizes=stage_sizes)
        taken = seconds(workload, Schedule.INTERLEAVED, Gather.EAGER, link=link, compute=compute, world_size=size)
        assert taken == pytest.approx(3.0 + 2 * steps * 0.01, rel=1e-9), "the others' pass while backward computes"
        late = seconds(workload, Schedule.ON_STEP, Gather.EAGER, link=link, compute=compute, world_size=size)
        is_pipelined = steps == 1
        num_waits = 1 + (1 if is_pipelined else num_layers)
        assert late == pytest.approx(3.0 + num_waits * steps * 0.01, rel=1e-9)
        messages = replace(link, latency=0.0, seconds_per_message=0.01)
        taken = seconds(workload, Schedule.INTERLEAVED, Gather.EAGER, link=messages, compute=compute, world_size=size)
        assert taken == pytest.approx(3.0 + 2 * sum(link.messages(size)) * 0.01, rel=1e-9)


@pytest.mark.parametrize(("schedule", "gather"), WAYS)
def test_bytes_that_the_computing_core_moves_cost_what_they_cost(schedule: Schedule, gather: Gather) -> None:
    workload = layers(5)
    compute = Compute(forward=0.1, backward=0.2, cpu_seconds_per_byte=1e-7)
    moving = 2 * 4 * workload.numel * 3 / 4 * 1e-7
    assert seconds(workload, schedule, gather, compute=compute) == pytest.approx(0.3 + moving, rel=1e-6)


def test_agreeing_on_unused_parameters_costs_a_wait_for_every_bucket() -> None:
    workload, link = layers(5), Link(bytes_per_second=math.inf, latency=0.01)
    often, never = (
        seconds(workload, Schedule.ON_STEP, Gather.EAGER, link=link, agreement=agreement)
        for agreement in (Agreement.ALWAYS, Agreement.NEVER)
    )
    assert often == pytest.approx(never + 5 * 2 * 0.01)


def test_a_lazy_gather_is_hidden_behind_the_next_forward() -> None:
    workload = layers(8)
    link, compute = Link(bytes_per_second=1e9), Compute(forward=1.0, backward=1.0)
    gathering = 4 * workload.numel * 3 / 4 / 1e9
    eager, lazy = (seconds(workload, Schedule.ON_STEP, how, link=link, compute=compute) for how in Gather)
    # All but what the first layer waits for; and the last reduction, which nothing can hide.
    assert eager == pytest.approx(2 + gathering / 8 + gathering, rel=1e-9)
    assert lazy == pytest.approx(2 + gathering / 8 + gathering / 8, rel=1e-9)


@pytest.mark.parametrize(
    "wrong", [{"bytes_per_second": 0}, {"bytes_per_second": 1, "latency": -1}, {"bytes_per_second": math.nan}]
)
def test_links_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="a link has a rate"):
        Link(**wrong)


@pytest.mark.parametrize("wrong", [{"forward": -1, "backward": 0}, {"forward": 0, "backward": 0, "cores": 0}])
def test_computing_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="computing has cores"):
        Compute(**wrong)


def test_a_world_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size must be at least 1"):
        forecast_ddp(layers(1), world_size=0, link=Link(bytes_per_second=1), compute=IDLE)


# --- monotony ---------------------------------------------------------------------------------------------------------


SWEEPS: dict[str, list[float]] = {
    "forward": [0, 0.01, 0.05, 0.2],
    "backward": [0, 0.01, 0.05, 0.2],
    "step_seconds_per_element": [0, 1e-9, 1e-8, 1e-7],
    "host_seconds_per_bucket": [0, 1e-4, 1e-3],
    "cpu_seconds_per_byte": [0, 1e-10, 1e-9, 5e-9],
    "latency": [0, 1e-5, 1e-3, 1e-2],
    "seconds_per_message": [0, 1e-5, 1e-3],
    "seconds_per_byte": [1e-12, 1e-10, 1e-9, 1e-8, 1e-7],
}


@pytest.mark.parametrize("cost", SWEEPS)
@pytest.mark.parametrize("size", [2, 16])
def test_a_step_takes_no_less_when_anything_costs_more(cost: str, size: int) -> None:
    workload = layers(9, numel=2**18, per_bucket=2)
    before: list[Forecast] = []
    for value in SWEEPS[cost]:
        link = Link(bytes_per_second=1e9, latency=1e-4)
        compute = Compute(forward=0.02, backward=0.04, step_seconds_per_element=1e-9, cpu_seconds_per_byte=1e-10)
        if cost == "seconds_per_byte":
            link = replace(link, bytes_per_second=1 / value)
        elif hasattr(link, cost):
            link = replace(link, **{cost: value})
        else:
            compute = replace(compute, **{cost: value})
        found = forecast_all(workload, world_size=size, link=link, compute=compute)
        for less, more in zip(before, found, strict=False):
            assert more.step_seconds >= less.step_seconds * (1 - 1e-6), (cost, value, more.name)
        for each in found:
            assert each.wire_seconds <= each.step_seconds * (1 + 1e-9)
            assert each.step_seconds >= each.sent_bytes / link.bytes_per_second * (1 - 1e-3), each.name
            assert each.step_seconds >= (compute.forward + compute.backward) * (1 - 1e-9)
        before = found


def test_more_ranks_hold_less_and_send_more() -> None:
    workload = workload_of([ModelParam((512, 512), torch.float32, 1.0)] * 12, optimizer_class=torch.optim.AdamW)
    held = [sharded_memory(workload, size).held for size in (1, 2, 4, 64, 4096)]
    sent = [sent_bytes(workload, size, rank=GroupRank(0), stage_sizes=stage_sizes(size)) for size in (1, 2, 4, 64)]
    assert held[1:] == sorted(held[1:], reverse=True)
    assert sent == sorted(sent)
    assert sent[0] == 0


# --- the same as elsewhere --------------------------------------------------------------------------------------------


def test_buckets_are_those_that_ddp_rebuilds() -> None:
    rng = random.Random(0)
    for _ in range(200):
        params = [Param(rng.choice([1, 10, 1000, 40_000]), ready_at=rng.random()) for _ in range(rng.randrange(1, 40))]
        order = sorted(range(len(params)), key=lambda i: params[i].ready_at)
        tensors = [torch.empty(params[i].numel, device="meta") for i in order]
        first, cap = rng.choice([None, 4, 4000]), rng.choice([1, 4000, 100_000, MB])
        theirs, _ = dist._compute_bucket_assignment_by_size(
            tensors, [cap if first is None else first, cap], [False] * len(order), order
        )
        ours = bucketize(params, cap_bytes=cap, first_bytes=first)
        assert [[slot.param for slot in bucket] for bucket in ours] == theirs
    mixed = [Param(10, dtype="float32"), Param(10, dtype="bfloat16", itemsize=2), Param(10, dtype="float32")]
    assert [[s.param for s in bucket] for bucket in bucketize(mixed, cap_bytes=MB)] == [[2, 0], [1]]


@pytest.mark.parametrize("num_ranks", [*range(1, 65), 96, 4096])
def test_stages_are_those_of_the_adapter_and_without_one_there_is_one(num_ranks: int) -> None:
    staged = Link(bytes_per_second=1e9, stage_sizes=CpuGlooAdapter().stage_sizes)
    assert staged.stages(num_ranks) == stage_sizes(num_ranks)
    assert Link(bytes_per_second=1e9).stages(num_ranks) == zerolap.Adapter().stage_sizes(num_ranks) == (num_ranks,)
    ring = replace(staged, pattern=Pattern.RING)
    assert ring.stages(num_ranks) == (num_ranks,), "a ring has no stages, whoever the adapter is"
    assert sum(ring.messages(num_ranks)) == num_ranks - 1


@pytest.mark.parametrize("adapter", [CpuGlooAdapter(), zerolap.Adapter()], ids=["limited", "unlimited"])
def test_what_is_received_takes_a_bucket_or_what_the_adapter_allows(adapter: zerolap.Adapter) -> None:
    most = adapter.max_receive_bytes
    for megabytes in (1, 25, 100):
        params = [ModelParam((megabytes, MB // 4), torch.float32, 1.0)]
        workload = workload_of(params, optimizer_class=torch.optim.SGD, max_receive_bytes=most)
        expected = megabytes * MB if most is None else min(megabytes * MB, most)
        assert sharded_memory(workload, 2).received == expected
        assert sharded_memory(workload, 1).received == 0


@pytest.mark.parametrize("num_ranks", [16, 24, 64])
def test_bytes_of_an_exchange_in_stages_are_those_that_the_adapter_counts(num_ranks: int) -> None:
    model = Mlp()
    workload = workload_of(describe(model), optimizer_class=torch.optim.SGD, bucket_cap_mb=SMALL_BUCKETS, exact_cut=64)
    params = list(model.parameters())
    for rank in (0, 1, num_ranks // 2, num_ranks - 1):
        expected = 0
        for bucket, planned in zip(workload.layout, traffic_plan(workload, num_ranks), strict=True):
            flat = FlatBuffer([params[slot.param] for slot in bucket])
            bounds = planned.bounds()
            expected += 4 * (bounds[-1] - (bounds[rank + 1] - bounds[rank]))
            parts = zerolap.Parts.cut(flat.buffer, flat.positions(bounds))
            expected += bytes_of_gather(parts, stages_of(rank, num_ranks))
        sizes = stage_sizes(num_ranks)
        assert sent_bytes(workload, num_ranks, rank=GroupRank(rank), stage_sizes=sizes) == expected


def traffic_plan(workload: Workload, num_ranks: int) -> Any:
    from zerolap.schedule.ownership import Policy, assign_owners

    plan = assign_owners(workload.layout, world_size=num_ranks, policy=Policy.BY_ELEMENT, cut=workload.params[0].cut)
    return plan.buckets


class Wide(nn.Module):
    """Layers whose buckets hold several parameters, and one that is larger than a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(700, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(9))
        self.out = nn.Linear(24, 130)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x.abs().flatten().mul(100).long() % 700)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x)


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "masters": {"master_weights": True},
    "fp32 sums": {"master_weights": True, "reduce_dtype": torch.float32},
    "bf16 gathers": {"master_weights": True, "gather_dtype": torch.bfloat16},
    "int8": {"wire": zerolap.Wire(gradients="int8", parameters="int8")},
    "fp8, bf16": {"wire": zerolap.Wire(gradients="fp8", parameters="bf16")},
}
CASES: list[tuple[type[nn.Module], Any, dict[str, Any], str, torch.dtype]] = [
    (Mlp, torch.optim.AdamW, {"lr": 0.01}, "fp32", torch.float32),
    (Wide, torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}, "bf16 gathers", torch.float32),
    (Wide, torch.optim.AdamW, {"lr": 0.01}, "masters", torch.bfloat16),
    (Wide, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}, "fp32 sums", torch.bfloat16),
    (Wide, torch.optim.SGD, {"lr": 0.01}, "fp32", torch.float32),
    (Wide, torch.optim.Adafactor, {"lr": 0.01}, "fp32", torch.float32),
    (Wide, torch.optim.AdamW, {"lr": 0.01}, "int8", torch.float32),
    (Wide, torch.optim.Adafactor, {"lr": 0.01}, "fp8, bf16", torch.bfloat16),
]


def _counted() -> list[tuple[int, int, list[list[int]]]]:
    counted = []
    for make, optimizer_class, options, precision, dtype in CASES:
        ddp = DDP(make().to(dtype), bucket_cap_mb=SMALL_BUCKETS)
        zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class, overlap_with_ddp=True, **options)
        handle = zerolap.attach(ddp, zero, **PRECISIONS[precision])
        sent = 0
        for x in batches(4):
            sent = handle.stats().sent_bytes
            backward(ddp, x.to(dtype))
        stats = handle.stats()
        assert zero._engine is not None
        layout = [list(bucket.places) for bucket in zero._engine.layout]
        counted.append((stats.sent_bytes - sent, stats.state_bytes, layout))
    return counted


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_and_states_are_those_that_real_ranks_count(world_size: int) -> None:
    of_ranks = run_ranks(world_size, _counted)
    for case, (make, optimizer_class, options, precision, dtype) in enumerate(CASES):
        workload = workload_of(
            describe(make().to(dtype)),
            optimizer_class=optimizer_class,
            optimizer_options=options,
            precision=Precision(**PRECISIONS[precision]),
            bucket_cap_mb=SMALL_BUCKETS,
            exact_cut=64,
        )
        for rank in range(world_size):
            sent, state_bytes, layout = of_ranks[rank][case]
            assert [[slot.param for slot in bucket] for bucket in workload.layout] == layout
            memory = sharded_memory(workload, world_size, rank=GroupRank(rank))
            assert memory.state + memory.masters == state_bytes, CASES[case]
            assert sent_bytes(workload, world_size, rank=GroupRank(rank), stage_sizes=[world_size]) == sent, CASES[case]


def _matrices(ddp: DDP) -> list[list[Tensor]]:
    """Of hidden layers, and all other parameters: as forecasts share them out."""
    params = [param for param in ddp.parameters() if param.requires_grad]
    numbers = [described.optimizer for described in shared_out(describe(ddp.module), 2)]
    return [[param for param, of in zip(params, numbers, strict=True) if of == number] for number in range(2)]


def _muon_and_adamw() -> list[tuple[Any, dict[str, Any]]]:
    return [(torch.optim.Muon, {"lr": 0.01}), (torch.optim.AdamW, {"lr": 0.01})]


def _counted_of_two() -> tuple[int, int, float]:
    ddp = DDP(Wide(), bucket_cap_mb=SMALL_BUCKETS)
    optimizers = [
        zerolap.ZeroRedundancyOptimizer(params, optimizer_class, overlap_with_ddp=True, **options)
        for params, (optimizer_class, options) in zip(_matrices(ddp), _muon_and_adamw(), strict=True)
    ]
    handle, sent = zerolap.attach(ddp, optimizers), 0
    for x in batches(4):
        sent = handle.stats().sent_bytes
        backward(ddp, x)
    stats = handle.stats()
    return stats.sent_bytes - sent, stats.state_bytes, stats.state_balance


@NEEDS_MUON
@pytest.mark.parametrize("world_size", [2, 4])
def test_of_two_optimizers_bytes_states_and_balance_are_those_that_real_ranks_count(world_size: int) -> None:
    of_ranks = run_ranks(world_size, _counted_of_two)
    workload = workload_of(
        shared_out(describe(Wide()), 2),
        optimizer_class=[each for each, _ in _muon_and_adamw()],
        optimizer_options=[options for _, options in _muon_and_adamw()],
        bucket_cap_mb=SMALL_BUCKETS,
        exact_cut=64,
    )
    for rank, (sent, state_bytes, balance) in enumerate(of_ranks):
        memory = sharded_memory(workload, world_size, rank=GroupRank(rank))
        assert memory.state == state_bytes
        assert sent_bytes(workload, world_size, rank=GroupRank(rank), stage_sizes=[world_size]) == sent
        assert balance_of(workload, world_size).state == pytest.approx(
            balance, rel=0.02
        )  # which knows of cut ones, too
    # Of nine equal matrices the busiest rank has more than the mean.
    matrices = 9 * 24 * 24 * (32 + 24)
    busiest = -(-9 // world_size) * world_size / 9
    total = matrices + 32 * (workload.numel - 9 * 24 * 24)
    assert balance_of(workload, world_size).work == pytest.approx(1 + (busiest - 1) * matrices / total)


@NEEDS_MUON
def test_an_update_of_matrices_takes_a_rank_its_share_of_it() -> None:
    params = shared_out([ModelParam((512, 512), torch.float32, 1.0)] * 25, 2)
    compute = Compute(forward=0.0, backward=0.0, step_seconds_per_element=1e-9)
    link = Link(bytes_per_second=math.inf)
    for cap in (0.5, 100):
        workload = workload_of(params, optimizer_class=[torch.optim.Muon, torch.optim.AdamW], bucket_cap_mb=cap)
        plain, eager, *_ = forecast_all(workload, world_size=4, link=link, compute=compute)
        whole = 24 * 512 * 512 * (512 + 32) / 32 + 512 * 512
        assert plain.step_seconds == pytest.approx(whole * 1e-9)
        assert eager.step_seconds == pytest.approx(whole / 4 * 1e-9)


def test_copies_in_another_dtype_pile_up_where_the_wire_is_slow() -> None:
    workload = layers(8, reduce_itemsize=8)
    fast, slow = (
        forecast(
            workload,
            world_size=2,
            link=Link(bytes_per_second=rate),
            compute=Compute(forward=0.1, backward=0.2),
            schedule=Schedule.INTERLEAVED,
            gather=Gather.EAGER,
        ).memory
        for rate in (1e12, 1e6)
    )
    assert fast.copies == 8 * NUMEL
    assert slow.copies > 6 * fast.copies
    assert slow.held == fast.held


def test_shares_of_whole_parameters_are_as_uneven_as_they_are() -> None:
    params = (
        Param(1_000_000, state_bytes_per_piece=12, cut=None),
        *(Param(1000, state_bytes_per_piece=7, cut=None) for _ in range(20)),
    )
    workload = Workload(params=params, layout=bucketize(params, cap_bytes=64 * MB))
    (bucket,) = traffic_of(workload, 64)
    few = traffic_of(workload, 16)[0]
    assert bucket.updated == pytest.approx(1_000_000)
    assert few.updated == pytest.approx(1_000_000)
    assert bucket.reduce_bytes == pytest.approx(4 * 63 * 1_000_000), "its owner receives it from everybody"
    memory = sharded_memory(workload, 64)
    assert memory.reduced == 4_000_000
    assert memory.state == 12
    total = sum(sharded_memory(workload, 64, rank=GroupRank(rank)).state for rank in range(64))
    assert total == 12 + 20 * 7


# --- measuring --------------------------------------------------------------------------------------------------------


def test_calibration_finds_the_link_that_was_measured() -> None:
    rate, latency, burst = 1e8, 3e-3, 2e6

    def taken(num_bytes: float) -> tuple[float, float]:
        return num_bytes, latency + max(0.0, num_bytes - burst) / rate

    measured = Measured(
        forward=0.1,
        backward=0.2,
        used_at=(0.0,),
        ready_at=(1.0,),
        buckets=((0,),),
        step_seconds_per_element=1e-9,
        exchanges=(taken(1e7), taken(64), taken(5e7)),
        cpu_seconds_per_byte=1e-9,
    )
    link, compute = calibrate(measured, cores=2)
    assert link.bytes_per_second == pytest.approx(rate)
    assert link.latency == pytest.approx(latency, rel=1e-3)
    assert (compute.forward, compute.backward, compute.cores) == (0.1, 0.2, 2)
    with pytest.raises(ValueError, match="three exchanges of different size"):
        calibrate(replace(measured, exchanges=(taken(1), taken(2))))


class Attention(nn.Module):
    """The output layer of torch's attention is never called; its weight is used inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.last = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.attention(x, x, x, need_weights=False)[0])


def _measured() -> tuple[Measured, list[list[int]], int, int]:
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 16, 32)
    before = [param.detach().clone() for param in model.parameters()]
    found = measure(
        model,
        lambda ddp: ddp(x).square().mean(),
        optimizer_class=torch.optim.AdamW,
        bucket_cap_mb=SMALL_BUCKETS,  # type: ignore[arg-type]  # any number
    )
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    ddp = DDP(model, bucket_cap_mb=SMALL_BUCKETS)
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True)
    handle = zerolap.attach(ddp, zero)
    sent = 0
    for _ in range(3):
        sent = handle.stats().sent_bytes
        ddp(x).square().mean().backward()
    assert zero._engine is not None
    layout = [list(bucket.places) for bucket in zero._engine.layout]
    return found, layout, handle.stats().sent_bytes - sent, handle.stats().state_bytes


def test_a_model_is_measured_on_real_ranks() -> None:
    (measured, layout, sent, state_bytes), (other, *_) = run_ranks(2, _measured)
    assert measured == other, "all ranks know the same"
    assert [list(bucket) for bucket in measured.buckets] == layout
    model = Attention()
    names = [name for name, _ in model.named_parameters()]
    used_at = dict(zip(names, measured.used_at, strict=True))
    assert used_at["first.weight"] < used_at["attention.in_proj_weight"] < used_at["last.weight"]
    assert used_at["attention.out_proj.weight"] == used_at["attention.in_proj_weight"], "where its caller begins"
    ready_at = [max(measured.ready_at[i] for i in bucket) for bucket in layout]
    assert ready_at == sorted(ready_at)
    assert 0 < ready_at[0] < ready_at[-1] <= 1
    assert 0 < measured.cpu_seconds_per_byte < 1e-5
    assert 0 < measured.host_seconds_per_bucket < 0.1
    workload = workload_of(describe(model), optimizer_class=torch.optim.AdamW, exact_cut=64, measured=measured)
    link, compute = calibrate(measured)
    first = forecast_all(workload, world_size=2, link=link, compute=compute)[1]
    assert first.sent_bytes == sent
    assert first.memory.state == state_bytes
    assert first.step_seconds >= measured.forward + measured.backward


# --- choosing ---------------------------------------------------------------------------------------------------------


def _all(rate: float, compute: Compute, **changes: Any) -> list[Forecast]:
    return forecast_all(layers(20), world_size=8, link=Link(bytes_per_second=rate, **changes), compute=compute)


def test_what_is_recommended_is_the_fastest_or_the_simplest_that_is_as_fast() -> None:
    compute = Compute(forward=0.1, backward=0.2, step_seconds_per_element=1e-10)
    hidden = recommend(_all(1e12, compute))
    assert (hidden.best.schedule, hidden.best.gather) == (Schedule.INTERLEAVED, Gather.EAGER)
    assert "hidden behind computing" in hidden.why
    narrow = recommend(_all(1e6, compute))
    assert "the wire is the limit" in narrow.why
    found = _all(1e8, compute)
    clipped = recommend(found, changes_gradients=True)
    assert clipped.best.schedule is Schedule.ON_STEP
    assert clipped.best.gather is Gather.LAZY, "its gathers take a while, and are hidden"
    assert recommend(found).best.step_seconds <= 1.02 * min(each.step_seconds for each in found[1:])
    with pytest.raises(ValueError, match="nothing to choose from"):
        recommend(found[:1])


# --- speed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "gather"), WAYS)
def test_a_forecast_is_cheap(schedule: Schedule, gather: Gather) -> None:
    workload = layers(30, numel=2**20)
    compute, link = Compute(forward=0.1, backward=0.2, step_seconds_per_element=1e-9), Link(bytes_per_second=1e9)
    taken = []
    for _ in range(3):
        start = time.process_time()
        seconds(workload, schedule, gather, link=link, compute=compute, world_size=8)
        taken.append(time.process_time() - start)
    assert min(taken) < 0.05, (schedule, gather, taken)  # 3 to 10 ms here; the rest is for slow machines


def test_7_billion_parameters_on_4096_ranks_are_forecast_in_seconds() -> None:
    from zerolap.cli.plan_inputs import typical

    start = time.process_time()
    workload = workload_of(typical(7e9), optimizer_class=torch.optim.AdamW)
    found = forecast_all(
        workload,
        world_size=4096,
        link=Link(bytes_per_second=5e10, latency=1e-5, pattern=Pattern.RING),
        compute=Compute(forward=0.5, backward=1.0),
    )
    assert time.process_time() - start < 2, len(workload.layout)
    assert len(found) == 7
    assert found[1].memory.state == pytest.approx(8 * workload.numel / 4096, rel=0.01)


def test_bytes_and_memory_of_a_hundred_thousand_parameters_on_4096_ranks_are_quick() -> None:
    rng = random.Random(0)
    for cut in (64, None):
        params = tuple(
            Param(rng.randrange(1, 100_000), ready_at=1 - i / 100_000, state_bytes_per_element=8, cut=cut)
            for i in range(100_000)
        )
        workload = Workload(params=params, layout=bucketize(params, cap_bytes=25 * MB))
        start = time.process_time()
        assert len(traffic_of(workload, 4096)) == len(workload.layout)
        held = sharded_memory(workload, 4096)
        sent = sent_bytes(workload, 4096, rank=GroupRank(0), stage_sizes=stage_sizes(4096))
        assert time.process_time() - start < 1, cut
        assert sent > 4 * workload.numel
        assert held.state >= 8 * workload.numel / 4096 * 0.99
