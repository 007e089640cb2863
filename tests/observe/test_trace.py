"""Traces of real runs: what is noted, that it is what happened, that it changes nothing, and what it costs."""

from __future__ import annotations

import copy
import pickle
import statistics
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
import zerolap_sim
from support.ranks import on_ranks
from support.sim_programs import device_group, on_device, small_batch, small_model
from support.stream_programs import GATHERS, SCHEDULES, SGD, Attached, sim_device
from support.training import HOOK_MAKERS, Mlp, assert_same_params, backward, batches, iterate, overlapped, pair
from zerolap.observe.timeline import Span, judge, merge, read
from zerolap_conformance.ranks import run_ranks, try_ranks
from zerolap_cpu_gloo import CpuGlooAdapter

ADAMW = {"lr": 0.01, "fused": False}
WAYS = [(schedule, gather) for schedule in SCHEDULES for gather in GATHERS]


def _attached(schedule: Any = "interleaved", gather: Any = "eager", **options: Any) -> tuple[DDP, Any, zerolap.Handle]:
    """A model of several buckets, trained until DDP's buckets have settled."""
    ddp = DDP(Mlp(), bucket_cap_mb=0.004)
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, **ADAMW)
    handle = zerolap.attach(ddp, zero, schedule=schedule, gather=gather, **options)
    for x in batches(3):
        iterate(ddp, zero, x)
    return ddp, zero, handle


def _of(spans: list[Span], kind: str) -> list[Span]:
    return [span for span in spans if span.kind == kind]


# --- what is noted ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "gather"), WAYS)
@on_ranks(2)
def test_every_moment_of_every_bucket_is_noted(schedule: str, gather: str) -> None:
    num = 3
    ddp, zero, handle = _attached(schedule, gather)
    num_buckets, first = handle.stats().num_buckets, handle.stats().num_updates + 1
    assert num_buckets > 2
    with handle.trace() as trace:
        with pytest.raises(RuntimeError, match="already"), handle.trace():
            pass
        for x in batches(num):
            iterate(ddp, zero, x)
        handle.finish()
    before = len(trace.spans)
    iterate(ddp, zero, x)
    spans = trace.spans
    assert len(spans) == before, "nothing is noted after the end"
    assert all(0 <= span.start <= span.end <= trace._record().seconds for span in spans), spans
    updates = range(first, first + num)
    for kind in ("ready", "reduce", "step", "gather"):
        found = Counter((span.bucket, span.update) for span in _of(spans, kind))
        assert found == Counter((b, u) for b in range(num_buckets) for u in updates), (kind, found)
    for key in ((b, u) for b in range(num_buckets) for u in updates):
        (ready, reduced, stepped, gathered) = (
            next(span for span in _of(spans, kind) if (span.bucket, span.update) == key)
            for kind in ("ready", "reduce", "step", "gather")
        )
        assert ready.end <= reduced.start <= reduced.end <= stepped.start <= stepped.end <= gathered.start, key
    for kind in ("forward", "backward"):
        assert [span.update for span in _of(spans, kind)] == list(updates), kind
    for forward, back in zip(_of(spans, "forward"), _of(spans, "backward"), strict=True):
        assert forward.end <= back.start
    assert len(_of(spans, "optimizer")) == (num if schedule == "on_step" else 0)
    where = Counter(span.name for span in _of(spans, "blocked"))
    assert where == Counter({"backward's end": num} | ({"step()": num} if schedule == "on_step" else {})), where
    uses = _of(spans, "use")
    if gather == "eager":
        assert uses == []
    else:
        buckets = trace._record().buckets
        named = [span for span in uses if span.name is not None]
        assert len(named) == num_buckets * (num - 1), "the last gathers are waited for by finish(), not by a module"
        for use in named:
            assert any(param.startswith(f"{use.name}.") for param in buckets[use.bucket or 0].params), use
    verdict = trace.verdict()
    assert verdict.num_updates == num
    assert verdict.hidden_percent is not None
    assert 0 <= verdict.hidden_percent <= 100
    assert verdict.communication_ms > 0
    assert verdict.late_ms is None, "one rank cannot know"


@on_ranks(2)
def test_torchs_hooks_are_traced_by_their_optimizer() -> None:
    for make in HOOK_MAKERS:
        ddp = DDP(Mlp(), bucket_cap_mb=0.004)
        zero = overlapped(ddp, ddp.parameters(), torch.optim.AdamW, hook_maker=make, **ADAMW)
        for x in batches(3):
            iterate(ddp, zero, x)
        with zerolap.trace(zero) as trace:
            iterate(ddp, zero, x)
        kinds = Counter(span.kind for span in trace.spans)
        assert kinds["ready"] == kinds["reduce"] == kinds["step"] == kinds["gather"] > 2, kinds
        assert trace.verdict().hidden_percent is not None
        with pytest.raises(ValueError, match="not attached"):
            zerolap.trace(ddp)


@on_ranks(2)
def test_a_trace_is_of_a_handle_a_ddp_or_an_optimizer() -> None:
    ddp, zero, handle = _attached()
    for target in (handle, ddp, zero):
        with zerolap.trace(target) as trace:
            iterate(ddp, zero, next(batches(1)))
        assert _of(trace.spans, "gather"), target
    with pytest.raises(TypeError, match="not of Mlp"):
        zerolap.trace(ddp.module)  # type: ignore[arg-type]
    handle.detach()
    with pytest.raises(RuntimeError, match="detached"):
        handle.trace()
    with pytest.raises(ValueError, match="not attached"):
        zerolap.trace(ddp)


# --- that it is what happened -----------------------------------------------------------------------------------------

LATE = 0.4  # seconds


def _late_peer(schedule: str, gather: str, folder: str) -> float:
    """Rank 1 comes late to its backward: rank 0 waits that long, and not only where it is blocked."""
    ddp, zero, handle = _attached(schedule, gather)
    dist.barrier()
    before = handle.stats()
    with handle.trace(folder) as trace:
        loss = ddp(next(batches(1))).square().sum()
        if dist.get_rank() == 1:
            time.sleep(LATE)
        loss.backward()
        zero.step()
    waited = (handle.stats().exposed_ms or 0.0) - (before.exposed_ms or 0.0)
    verdict = trace.verdict()
    assert abs(waited - verdict.exposed_ms) < 0.25 * 1e3 * LATE, (waited, verdict)
    return verdict.exposed_ms


@pytest.mark.parametrize(("schedule", "gather"), WAYS)
def test_waiting_for_a_late_rank_is_exposed_and_blamed_on_it(schedule: str, gather: str, tmp_path: Path) -> None:
    ranks = run_ranks(2, _late_peer, schedule, gather, str(tmp_path))
    assert ranks[0] > 0.8e3 * LATE > ranks[1], ranks
    verdict = judge(merge(read([tmp_path])).traces)
    assert verdict.late_ms is not None
    assert verdict.late_ms > 0.7e3 * LATE / 2, "on the average of two ranks"
    assert verdict.exposures[0].worst_rank == 0
    assert "bucket 0's reduce exposes" in str(verdict), verdict
    assert "backward's end waits for it" in str(verdict)


@on_ranks(2)
def test_a_gathers_end_is_seen_when_nobody_waits_for_it() -> None:
    """Gathers that nobody needs for a while are done long before they are waited for, and the trace has seen it."""
    ddp, zero, handle = _attached("interleaved", "lazy")
    dist.barrier()
    with handle.trace() as trace:
        iterate(ddp, zero, next(batches(1)))
        time.sleep(LATE)
        backward(ddp, next(batches(1)))
    gathers = {span.bucket: span for span in reversed(_of(trace.spans, "gather"))}
    uses = [span for span in _of(trace.spans, "use") if span.name]
    assert len(uses) == len(gathers)
    for use in uses:
        assert use.end - use.start < 0.1 * LATE
        assert gathers[use.bucket].end < use.start - 0.5 * LATE, (gathers[use.bucket], use)


# --- that it changes nothing ------------------------------------------------------------------------------------------


def _same_numbers(schedule: Any, gather: Any, gather_dtype: torch.dtype | None) -> None:
    oracle, ours = pair()
    plain = torch.optim.AdamW(oracle.parameters(), **ADAMW)
    zero = zerolap.ZeroRedundancyOptimizer(ours.parameters(), torch.optim.AdamW, overlap_with_ddp=True, **ADAMW)
    handle = zerolap.attach(
        ours, zero, schedule=schedule, gather=gather, gather_dtype=gather_dtype, master_weights=gather_dtype is not None
    )
    with handle.trace():  # from the first iteration on, in which states move
        for x in batches(5):
            iterate(ours, zero, x)
            if gather_dtype is None:
                iterate(oracle, plain, x)
        copied = copy.deepcopy(ours.module)
        pickle.loads(pickle.dumps(ours.module))
    handle.finish()
    assert_same_params(copied, ours.module)
    if gather_dtype is None:
        assert_same_params(ours, oracle)
    else:
        for param in ours.parameters():
            assert torch.equal(param, param.to(gather_dtype).float()), "every value was sent in 16 bits"


@pytest.mark.parametrize(("schedule", "gather"), WAYS)
@on_ranks(2)
def test_what_is_traced_has_the_same_numbers(schedule: str, gather: str) -> None:
    _same_numbers(schedule, gather, None)


@on_ranks(2)
def test_a_gather_that_ends_by_a_copy_can_be_traced() -> None:
    _same_numbers("interleaved", "lazy", torch.bfloat16)


@on_ranks(2)
def test_a_compiled_model_can_be_traced() -> None:
    ddp, zero, handle = _attached("on_step", "eager")
    compiled: Any = torch.compile(ddp.module, backend="eager", fullgraph=True)
    with handle.trace() as trace:
        compiled(next(batches(1)))  # not the DDP: only that hooks do not break what is compiled
        iterate(ddp, zero, next(batches(1)))
    assert _of(trace.spans, "gather")


class Broken(torch.optim.AdamW):
    is_broken = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if Broken.is_broken and dist.get_rank() == 1:
            raise ArithmeticError("deliberate")
        super().step(closure)


def _failing(folder: str) -> None:
    ddp = DDP(Mlp(), bucket_cap_mb=0.004)
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), Broken, overlap_with_ddp=True, **ADAMW)
    handle = zerolap.attach(ddp, zero, gather="lazy")
    for x in batches(2):
        iterate(ddp, zero, x)
    Broken.is_broken = True
    with handle.trace(folder):
        for x in batches(3):
            iterate(ddp, zero, x)


def test_a_failure_while_tracing_is_the_same_failure_and_leaves_no_file(tmp_path: Path) -> None:
    outcomes = try_ranks(2, _failing, str(tmp_path), group_timeout=5)
    for outcome in outcomes:
        assert "deliberate" in (outcome.error or "finished"), outcome.error
        assert outcome.seconds < 30
    assert list(tmp_path.iterdir()) == []


def _interrupted(folder: str) -> None:
    ddp, zero, handle = _attached()

    def interrupted() -> None:
        with handle.trace(folder):
            iterate(ddp, zero, next(batches(1)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    iterate(ddp, zero, next(batches(1)))
    with pytest.raises(ValueError, match="path must be a folder"), handle.trace(f"{folder}/rank0.json"):
        pass


def test_what_was_traced_before_an_interruption_is_written(tmp_path: Path) -> None:
    run_ranks(2, _interrupted, str(tmp_path))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["rank0.json", "rank1.json"]
    run = merge(read([tmp_path]))
    assert run.missing == ()
    assert "share its monotonic clock" in run.clock


# --- what it costs ----------------------------------------------------------------------------------------------------


class Counting(CpuGlooAdapter):
    num_moments = 0

    def moment(self) -> object:
        Counting.num_moments += 1
        return super().moment()


@pytest.mark.parametrize(("schedule", "gather"), WAYS)
@on_ranks(2)
def test_a_trace_takes_a_fixed_number_of_moments_a_bucket_and_none_when_off(schedule: str, gather: str) -> None:
    ddp, zero, handle = _attached(schedule, gather, adapter=Counting())
    assert Counting.num_moments == 0, "no moment is taken without a trace"
    num, num_buckets = 10, handle.stats().num_buckets
    labels, record = Counter[str](), profiler.record_function

    def counting(name: str, *args: Any) -> Any:
        labels[name] += name.startswith("zerolap:")  # torch's own optimizers have labels, too
        return record(name, *args)

    profiler.record_function = counting  # type: ignore[assignment,misc]
    with handle.trace():
        for x in batches(num):
            iterate(ddp, zero, x)
    per_update = Counting.num_moments / num
    assert per_update <= 15 * num_buckets + 14, (per_update, num_buckets)
    assert not labels.total(), "no label is made unless a profiler runs"
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
    ) as seen:
        iterate(ddp, zero, x)
        handle.finish()
    names = {event.name for event in seen.events()}
    for verb in ("reduce", "step", "gather"):
        assert {f"zerolap:{verb} bucket {b}" for b in range(num_buckets)} <= names, (verb, sorted(names))
    assert labels.total() >= 3 * num_buckets


def _timed(num_rounds: int) -> list[float]:
    """Processor time of iterations with a trace, in turns with ones without: the ratio in each round."""
    ddp = DDP(torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))), bucket_cap_mb=1)
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.01)
    handle = zerolap.attach(ddp, zero, gather="lazy")
    x = torch.randn(256, 512)

    def seconds(num: int = 4) -> float:
        start = time.process_time()
        for _ in range(num):
            iterate(ddp, zero, x)
        return time.process_time() - start

    seconds()
    ratios = []
    for place in range(num_rounds):
        taken = {}
        for is_traced in (place % 2 == 0, place % 2 == 1):  # in turns, so that what goes before is the same for both
            with handle.trace() if is_traced else nullcontext():
                taken[is_traced] = seconds()
        ratios.append(taken[True] / taken[False])
    return ratios


def test_a_trace_costs_little_processor_time() -> None:
    ratios = [ratio for of_rank in run_ranks(2, _timed, 12) for ratio in of_rank]
    # A wide margin, for others use this machine, too; the number of moments above is the sharper bound.
    assert statistics.median(ratios) < 1.1, sorted(ratios)


# --- on streams -------------------------------------------------------------------------------------------------------


class CountingSim(zerolap_sim.SimAdapter):
    calls: ClassVar[Counter[str]] = Counter()

    def synchronize(self) -> None:
        self.calls["synchronize"] += 1
        super().synchronize()

    def seconds_between(self, start: object, end: object) -> float:
        self.calls["seconds_between"] += 1
        return super().seconds_between(start, end)


def _on_streams(schedule: str, gather: str) -> dict[str, Any]:
    group = device_group()
    ddp = DDP(small_model().to(sim_device()), process_group=group, bucket_cap_mb=0.02)
    zero = zerolap.ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.SGD, process_group=group, overlap_with_ddp=True, **SGD
    )
    handle = Attached(CountingSim, schedule=schedule, gather=gather)(ddp, zero)

    loaded = [small_batch(step, sim_device()) for step in range(3)]  # now, for a copy from the host waits

    def train() -> None:
        for x, y in loaded:
            zero.zero_grad()
            torch.nn.functional.cross_entropy(ddp(x), y).backward()
            zero.step()

    train()
    zerolap_sim.configure(delay_us=10_000, delay_probability=0.5)  # the device is much slower than the host
    CountingSim.calls.clear()
    with handle.trace() as trace:
        begin, before = time.perf_counter(), CountingSim.calls.total()
        train()
        host_seconds, calls = time.perf_counter() - begin, CountingSim.calls.total() - before
    spans, stats = trace.spans, handle.stats()
    return {
        "begun_by": before,
        "calls": calls,
        "host_seconds": host_seconds,
        "device_seconds": trace._record().seconds,
        "kinds": Counter(span.kind for span in spans),
        "is_ordered": all(0 <= span.start <= span.end for span in spans),
        "gathers": [span.end - span.start for span in spans if span.kind == "gather"],
        "use_names": {span.name for span in spans if span.kind == "use"},
        "verdict": trace.verdict(),
        "is_simulated": trace._record().is_simulated,
        "num_buckets": stats.num_buckets,
        "exposed_ms": stats.exposed_ms,
    }


@pytest.mark.parametrize(("schedule", "gather"), WAYS)
def test_on_streams_a_trace_waits_for_nothing(schedule: str, gather: str) -> None:
    for found, reports in run_ranks(2, on_device, _on_streams, schedule, gather):
        assert reports == []
        assert found["begun_by"] == 1, "the device is waited for once, when the trace begins"
        assert found["calls"] == 0
        assert found["host_seconds"] < 0.5 * found["device_seconds"], found
        kinds, num = found["kinds"], 3 * found["num_buckets"]
        assert kinds["ready"] == kinds["reduce"] == kinds["step"] == num, kinds
        at_least = num if gather == "eager" else num - found["num_buckets"]  # the last ones may begin after the trace
        assert at_least <= kinds["gather"] <= num, kinds
        assert found["is_ordered"]
        assert max(found["gathers"]) > 0
        assert (found["use_names"] == set()) == (gather == "eager"), found["use_names"]
        assert found["verdict"].hidden_percent is not None
        assert found["is_simulated"]
        assert found["exposed_ms"] is None, "the host cannot know"
