"""Tier 0 to 2: what an adapter states beside its capabilities, and those capabilities that might be declared too cautiously."""

from __future__ import annotations

import math
import threading
import time
import uuid

import torch
import torch.distributed as dist

from zerolap import Adapter
from zerolap.runtime.peers import all_gather_json
from zerolap_conformance.cuts import smallest_cut
from zerolap_conformance.requirements import NotDeclaredError, requirement
from zerolap_conformance.support import Slow, device_of, expect, expect_equal, own_group, world

MOST_TOO_COARSE = 8


@requirement("DEV-9", "What is stated for forecasts and of memory is of its kind, and can be true.", tier=0)
def states_forecasts(adapter: Adapter) -> None:
    for num_ranks in (*range(1, 18), 24, 32, 64, 100, 1024):
        sizes = adapter.stage_sizes(num_ranks)
        assert isinstance(sizes, tuple), f"stage_sizes({num_ranks}) gives {sizes!r}"
        assert all(type(size) is int and size >= 1 for size in sizes), f"stage_sizes({num_ranks}) gives {sizes!r}"
        expect(math.prod(sizes), num_ranks, f"the product of stage_sizes({num_ranks}), which is {sizes}")
    most = adapter.max_receive_bytes
    assert most is None or (type(most) is int and most > 0), f"max_receive_bytes is {most!r}"
    kept = adapter.kept_bytes
    assert type(kept) is int, f"kept_bytes is {kept!r}"
    assert kept >= 0, f"kept_bytes is {kept!r}"


@requirement("DEV-10", "release_memory() leaves what is in use as it is.", tier=0)
def releases_memory(adapter: Adapter) -> None:
    device = device_of(adapter)
    tensors = [torch.arange(numel, device=device) for numel in (10, 5000, 1_000_003)]
    for _ in range(3):
        taken = [torch.ones(100_000, device=device) for _ in range(10)]
        del taken
        adapter.release_memory()
    for tensor in tensors:
        expect_equal(tensor, torch.arange(tensor.numel()), f"{tensor.numel()} elements in use")


@requirement("DEV-11", "synchronize() waits for everything every time, and leaves nothing behind.", tier=0, seconds=120)
def synchronizes_every_time(adapter: Adapter) -> None:
    from zerolap_conformance.leftovers import expect_nothing_left
    from zerolap_conformance.support import busy

    device = device_of(adapter)
    busy(device, 0.001)  # calibrates itself

    def use(number: int) -> None:
        for i in range(number):
            if device.type != "cpu":
                stream = torch.Stream(device=device)
                event = torch.Event(device=device)
                with stream if i % 2 else torch.accelerator.current_stream(device):
                    busy(device, 0.0015)
                    event.record()
                adapter.synchronize()
                assert event.query(), f"time {i}: work is left after synchronize()"
            else:
                adapter.synchronize()

    use(310)
    expect_nothing_left(adapter, lambda: use(60), "synchronize()")


@requirement(
    "DEV-12", "Names and the device are the same for every adapter that is made, and reasons are sentences.", tier=0
)
def is_of_one_kind(adapter: Adapter) -> None:
    for local_rank in range(2):
        device = adapter.device(local_rank)
        expect(device.type, adapter.device_type, f"the type of device({local_rank})")
        assert device.index is None or device.type != "cpu", f"device({local_rank}) is {device}: a host has no numbers"
    why = adapter.why_unavailable()
    assert why is None or (isinstance(why, str) and why), f"why_unavailable() gives {why!r}"


@requirement("CAP-3", "`exact_cut` is no coarser than it has to be.", tier=0)
def cuts_no_coarser(adapter: Adapter) -> list[str]:
    declared, found = adapter.capabilities.exact_cut, smallest_cut(device_of(adapter))
    assert found is not None, "no cut up to 4096 elements is exact on this device"
    assert declared >= found, f"exact_cut={declared} is declared, and {found} is the smallest that is exact"
    assert declared <= max(MOST_TOO_COARSE * found, 64), (
        f"exact_cut={declared} is declared, and {found} is exact: coarser cuts make shards uneven"
    )
    return [f"the smallest cut that is exact is {found}, {declared} is declared"] if declared != found else []


@requirement(
    "CAP-4", "`has_float64=False` is declared only where double precision cannot be computed with and reduced.", tier=2
)
def has_no_float64(adapter: Adapter) -> None:
    if adapter.capabilities.has_float64:
        raise NotDeclaredError("the adapter declares has_float64=True, which DEV-8 tries")
    exact = 1 + 2**-40
    try:
        x = torch.full((3,), exact, dtype=torch.float64).to(device_of(adapter))
        adapter.all_reduce(x, op=dist.ReduceOp.SUM, group=own_group(adapter), what="sum in double precision").wait()
        seen = x.cpu()
    except Exception:  # as it was declared
        return
    assert not torch.equal(seen, torch.full((3,), dist.get_world_size() * exact, dtype=torch.float64)), (
        "has_float64=False is declared, but sums in double precision are exact: norms would be taken in single precision for nothing"
    )


@requirement(
    "CAP-5",
    "On a device without streams `one_issue_order=True` is declared only where other orders do not work.",
    tier=2,
    min_ranks=2,
)
def needs_one_order(adapter: Adapter) -> None:
    if not adapter.capabilities.one_issue_order:
        raise NotDeclaredError("the adapter declares one_issue_order=False, which CAP-2 tries")
    if adapter.capabilities.futures_complete_at_enqueue:
        raise NotDeclaredError(
            "one_issue_order=True is believed of a device with streams: another order works by chance, or the device hangs"
        )
    groups = [own_group(adapter) for _ in range(2)]
    failed: list[BaseException] = []

    def attempt() -> None:
        try:
            for turn in range(10):
                tensors = [torch.full((50_000,), 1.0, device=device_of(adapter)) for _ in groups]
                order = (0, 1) if (dist.get_rank() + turn) % 2 else (1, 0)
                started = [
                    adapter.all_reduce(tensors[i], op=dist.ReduceOp.SUM, group=groups[i], what=f"group {i}")
                    for i in order
                ]
                for each in started:
                    each.wait()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(3)
    assert thread.is_alive() or failed, (
        "one_issue_order=True is declared, but collectives of two groups go in any order"
    )


@requirement(
    "CAP-6",
    "With `futures_complete_at_enqueue=False` a future is done when its peers have come, and not before.",
    tier=2,
    min_ranks=2,
)
def completes_futures_late(adapter: Adapter) -> None:
    if adapter.capabilities.futures_complete_at_enqueue:
        raise NotDeclaredError("the adapter declares futures_complete_at_enqueue=True, which CAP-1 tries")
    group, device = own_group(adapter), device_of(adapter)
    for turn in range(2):
        x = torch.ones(1000, device=device)
        dist.all_reduce(torch.zeros(1))  # a barrier on the host
        if group.rank() == turn % group.size():
            time.sleep(0.3)
            group.allreduce(x).wait()
        else:
            work = group.allreduce(x)
            is_done = work.get_future().done()
            work.wait()
            assert not is_done, "futures are done at enqueue, though futures_complete_at_enqueue is not declared"


@requirement(
    "GRP-5",
    "Groups keep apart whose long names differ in their last letter, and each opens and ends without delay.",
    tier=2,
)
def tells_names_apart(adapter: Adapter) -> None:
    name = str(all_gather_json(uuid.uuid4().hex, group=world(), what="agreeing on a name")[0])
    groups, slow = [], Slow()
    for number in range(5):
        begin = time.monotonic()
        groups.append(adapter.open_group(world(), name=f"zerolap-{name}-{number}"))
        all_gather_json(None, group=groups[-1], what="connecting a group")
        slow.note(0.6 * (time.monotonic() - begin), f"opening group {number}")
    for number, group in enumerate(groups):
        expect(
            (group.rank(), group.size()), (dist.get_rank(), dist.get_world_size()), f"rank and size in group {number}"
        )
        expect(adapter.timeout(group), adapter.timeout(world()), f"the timeout of group {number}")
    tensors = [
        torch.full((500,), float(10**number + dist.get_rank()), device=device_of(adapter)) for number in range(5)
    ]
    works = [
        adapter.all_reduce(x, op=dist.ReduceOp.SUM, group=group, what="sum")
        for x, group in zip(tensors, groups, strict=True)
    ]
    size = dist.get_world_size()
    for number, (work, x) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        total = float(size * 10**number + sum(range(size)))
        expect_equal(x, torch.full((500,), total), f"the sum in group {number}")
    for group in groups:
        adapter.close_group(group)
        adapter.close_group(group)


@requirement(
    "GRP-6", "A group of some ranks has their order and the timeout of the group it is like.", tier=2, min_ranks=2
)
def keeps_timeouts_of_some(adapter: Adapter) -> None:
    from datetime import timedelta

    whole, kind = list(range(dist.get_world_size())), dist.get_backend_config(world())
    for ranks, seconds in ((whole, 77), (whole[::-1], 33), (whole[1:], 44)):
        like = dist.new_group(ranks, backend=kind, sort_ranks=False, timeout=timedelta(seconds=seconds))
        if dist.get_rank() in ranks:
            assert like is not None
            for _ in range(2):
                group = own_group(adapter, like)
                expect(adapter.timeout(group), timedelta(seconds=seconds), f"the timeout of a group of ranks {ranks}")
                expect(group.rank(), ranks.index(dist.get_rank()), f"the rank in a group of ranks {ranks}")
                adapter.close_group(group)
        dist.all_reduce(torch.zeros(1))
