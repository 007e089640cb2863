"""The stream path on the simulated device, with every adapter's own class: bitwise, and nothing unordered."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import zerolap
import zerolap_sim
from support.sim_programs import on_device
from support.stream_mutants import MUTANTS, run_mutants
from support.stream_programs import (
    GATHERS,
    SCHEDULES,
    Attached,
    Hooked,
    clipped,
    every_way,
    failing,
    freed_bytes,
    handled,
    joined,
    precisions,
    refused,
    rounds_behind_a_busy_stream,
    scaled,
    several,
    train_fsdp2,
    train_transformer,
    with_unused,
    written,
)
from support.versions import NEEDS_MUON
from zerolap_ascend_hccl import AscendHcclAdapter
from zerolap_conformance.ranks import run_ranks, try_ranks
from zerolap_cuda_nccl import CudaNcclAdapter
from zerolap_sim import build
from zerolap_xpu import XpuAdapter

# Every adapter by its own class; only one can have its own names, for torch keeps "cuda" and "xpu" to itself.
ADAPTERS: dict[str, tuple[str, str, Callable[[], zerolap.Adapter]]] = {
    "sim": ("sim", "simccl", zerolap_sim.SimAdapter),
    "cuda_nccl": ("sim", "simccl", partial(CudaNcclAdapter, device_type="sim", backend="simccl")),
    "xpu": ("sim", "simccl", partial(XpuAdapter, device_type="sim", backend="simccl")),
    "ascend_hccl": ("npu", "hccl", AscendHcclAdapter),
}


DELAYS: tuple[dict[str, Any], ...] = ({}, {"delay_us": 1000, "delay_probability": 0.05, "seed": 3})


def _all_ways_are_right(
    adapter: str, num_ranks: int, delays: Sequence[dict[str, Any]], *, shard_gradients: bool = False
) -> None:
    name, backend, make = ADAPTERS[adapter]
    ways = {
        f"{s}, {g}": Attached(make, schedule=s, gather=g, shard_gradients=shard_gradients)
        for s, g in product(SCHEDULES, GATHERS)
    }
    for delay in delays:
        for found, late in run_ranks(
            num_ranks, on_device, every_way, ways, backend, name=name, collectives=backend, **delay
        ):
            assert late == []
            for way, (to_cpu, to_synchronous, reports) in found.items():
                assert reports == [], f"{way}: {reports[0]}"
                assert to_synchronous == 0, way
                # Bitwise where sums over ranks have one order only, and shards end where the CPU's kernels allow.
                assert to_cpu <= (0 if num_ranks == 2 and adapter == "sim" else 1e-6), f"{way}: {to_cpu}"


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    build.build()  # outside the time limits of the ranks


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_all_schedules_and_gathers_are_right_and_ordered(adapter: str) -> None:
    _all_ways_are_right(adapter, 2, DELAYS[:1])


def test_gradients_that_are_freed_are_freed_in_order() -> None:
    _all_ways_are_right("sim", 2, DELAYS, shard_gradients=True)


def test_rounded_exchanges_are_ordered() -> None:
    name, backend, make = ADAPTERS["sim"]
    all_of_it = zerolap.Wire(gradients="int8", parameters="int8", gradient_feedback=True, seed=1)
    ways = {
        f"{wire}, {schedule}": Attached(make, wire=wire, schedule=schedule, gather=gather, **options)
        for wire, schedule, gather, options in (
            ("int8", "interleaved", "lazy", {}),
            (all_of_it, "after_backward", "eager", {"shard_gradients": True}),
            ("fp8", "on_step", "lazy", {}),
            (zerolap.Wire(parameters="bf16"), "interleaved", "eager", {}),
        )
    }
    for num_ranks, delay in ((2, DELAYS[0]), (3, DELAYS[-1])):
        for found, late in run_ranks(
            num_ranks, on_device, every_way, ways, backend, name=name, collectives=backend, **delay
        ):
            assert late == []
            for way, (to_cpu, to_synchronous, reports) in found.items():
                assert reports == [], f"{way}: {reports[0]}"
                assert to_synchronous == 0, way
                assert 0 < to_cpu < 0.05, f"{way}: {to_cpu}"


def test_rounding_waits_for_nothing_on_the_host() -> None:
    ((was_busy, late),) = run_ranks(1, on_device, rounds_behind_a_busy_stream)
    assert (was_busy, late) == ([True, True, True], [])


@NEEDS_MUON
@pytest.mark.parametrize(("num_ranks", "adapter"), [(2, "sim"), (2, "cuda_nccl"), (3, "sim")])
def test_two_optimizers_are_right_and_send_no_padding(num_ranks: int, adapter: str) -> None:
    name, backend, make = ADAPTERS[adapter]
    for options in (
        {"schedule": "interleaved", "gather": "lazy"},
        {"schedule": "after_backward", "shard_gradients": True},
        {"schedule": "on_step", "gather": "lazy", "shard_gradients": True},
    ):
        for (to_cpu, to_synchronous, sent), late in run_ranks(
            num_ranks, on_device, partial(several, make, **options), name=name, collectives=backend
        ):
            assert late == []
            assert to_synchronous == 0
            assert to_cpu <= (1e-6 if num_ranks == 2 else 1e-3), (options, to_cpu)  # Muon computes in bfloat16
            assert sent <= 1.1, (options, sent)


@pytest.mark.soak
@pytest.mark.parametrize("shard_gradients", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_all_of_it_holds_with_delays_too(adapter: str, num_ranks: int, shard_gradients: bool) -> None:
    _all_ways_are_right(adapter, num_ranks, DELAYS, shard_gradients=shard_gradients)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_memory_of_a_device_follows_what_is_freed(schedule: str) -> None:
    """Bytes in use on the device, after a step and at most in one: of gradients only a few buckets, and what an update has yet to use."""
    for (held, peak, model, bucket), reports in run_ranks(2, on_device, freed_bytes, zerolap_sim.SimAdapter, schedule):
        assert reports == []
        assert held <= model / 100, "of gradients, after the step"
        assert peak <= 4 * bucket + model / 2 + model / 20, (peak / bucket, model / bucket)


HOOKS = (zerolap.hook_with_zero_step, zerolap.hook_with_zero_step_interleaved)


def test_both_hooks_are_right_and_ordered() -> None:
    ways = {f"{make.__name__}, {s}": Hooked(make, shard_buckets=s) for make, s in product(HOOKS, (False, True))}
    for found, _ in run_ranks(2, on_device, every_way, ways):
        for way, (to_cpu, to_synchronous, reports) in found.items():
            assert (to_cpu, to_synchronous, reports) == (0, 0, []), way


# --- everything else of attach() --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "gather"), [("interleaved", "lazy"), ("on_step", "eager")])
def test_master_weights_and_dtypes_on_the_wire_are_ordered(schedule: str, gather: str) -> None:
    for worst, reports in run_ranks(2, on_device, precisions, zerolap_sim.SimAdapter, schedule, gather):
        assert (worst, reports) == (0, [])


def test_parameters_reached_through_the_optimizer_are_waited_for_and_early_writes_refused() -> None:
    for (difference, beyond, error), reports in run_ranks(2, on_device, written, zerolap_sim.SimAdapter):
        assert difference == 0
        assert set(beyond) == {0}, "a parameter's storage is not its own"
        assert "between their update and the end of their gather" in error
        assert all("'mul' on" in report for report in reports), reports  # the early write itself


class WithoutFloat64(zerolap_sim.SimAdapter):
    """A backend that reduces what its capabilities say, and nothing else."""

    capabilities = AscendHcclAdapter.capabilities

    def all_reduce(self, tensor: Tensor, **options: Any) -> zerolap.Pending:
        assert tensor.dtype in (torch.float32, torch.int32), tensor.dtype
        return super().all_reduce(tensor, **options)


@pytest.mark.parametrize("make", [zerolap_sim.SimAdapter, WithoutFloat64])
def test_clipping_is_torchs_and_ordered(make: type[zerolap.Adapter]) -> None:
    for (to_cpu, to_synchronous), reports in run_ranks(2, on_device, clipped, make):
        assert reports == []
        assert to_synchronous == 0
        assert to_cpu < 1e-5


def test_overflowing_losses_skip_the_same_steps_on_all_ranks() -> None:
    ranks = run_ranks(2, on_device, scaled, zerolap_sim.SimAdapter)
    for (num_updates, scales, is_finite), reports in ranks:
        assert reports == []
        assert (num_updates, is_finite) == (6, True)
        assert scales == [1024.0, 1024.0, 512.0, 512.0, 512.0, 256.0, 256.0, 256.0]


def test_traces_detaching_and_whole_states() -> None:
    for found, reports in run_ranks(2, on_device, handled, zerolap_sim.SimAdapter):
        assert reports == []
        assert found["difference"] == 0
        assert found["kinds"] >= {"ready", "reduce", "step", "gather", "use"}, found["kinds"]
        assert found["is_ordered"]
        assert found["states"] in (None, 8)


@pytest.mark.parametrize("make", [zerolap_sim.SimAdapter, WithoutFloat64])
def test_parameters_that_no_rank_used_are_left_alone(make: type[zerolap.Adapter]) -> None:
    for difference, reports in run_ranks(2, on_device, with_unused, make, "interleaved", "lazy"):
        assert reports == []
        assert difference <= (0 if make is zerolap_sim.SimAdapter else 1e-6)


def test_join_works_where_collectives_keep_their_order_and_is_refused_where_not() -> None:
    for difference, reports in run_ranks(2, on_device, joined, zerolap_sim.SimAdapter, "after_backward"):
        assert difference == 0
        # Join itself drops a count of ranks that is still being reduced; that is torch's own business.
        assert [report for report in reports if "a float tensor of shape [1] " not in report] == []
    for outcome in try_ranks(2, on_device, joined, zerolap_sim.SimAdapter, "interleaved", group_timeout=5):
        assert "cannot work under Join on this device" in (outcome.error or "finished")


@pytest.mark.parametrize(("collective", "kind"), [("reduce_scatter", "failure"), ("all_gather", "timeout")])
@pytest.mark.parametrize("schedule", ["interleaved", "on_step"])
def test_a_collective_that_fails_ends_training_on_all_ranks(collective: str, kind: str, schedule: str) -> None:
    outcomes = try_ranks(2, on_device, failing, zerolap_sim.SimAdapter, collective, kind, schedule, group_timeout=10)
    for outcome in outcomes:
        assert "simulated" in (outcome.error or "finished"), outcome.error
        assert outcome.seconds < 30, outcome.seconds
    assert collective in (outcomes[1].error or "")


def test_what_does_not_fit_is_refused() -> None:
    for outcome in try_ranks(2, on_device, refused, zerolap_sim.SimAdapter):
        assert re.search(
            r"ValueError: adapter 'sim' needs a process group with backend 'simccl' for 'sim'", outcome.error or ""
        )
    with pytest.raises(ValueError, match="on device type 'npu', not on 'hpu'"):
        AscendHcclAdapter(device_type="hpu")


def test_adapters_of_absent_devices_say_why_and_break_nothing() -> None:
    found = {info.name: info for info in zerolap.adapters()}
    assert found["cpu_gloo"].why_unusable is None
    assert found["cuda_nccl"].why_unusable == "torch.cuda finds no device"
    assert found["xpu"].why_unusable == "torch.xpu finds no device"
    assert "torch_npu is not installed" in (found["ascend_hccl"].why_unusable or "")
    assert "test tool" in (found["sim"].why_unusable or "")
    for adapter in (AscendHcclAdapter(), CudaNcclAdapter(), XpuAdapter()):
        assert not adapter.is_available()


def test_diagnoses_name_the_setting_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_HCCL_HIGH_PRIORITY", "TORCH_XCCL_HIGH_PRIORITY", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    assert CudaNcclAdapter().diagnose() == []
    assert "TORCH_HCCL_HIGH_PRIORITY=1" in AscendHcclAdapter().diagnose()[0]
    assert "TORCH_XCCL_HIGH_PRIORITY=1" in XpuAdapter().diagnose()[0]
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert "unset it" in CudaNcclAdapter().diagnose()[0]


# --- no false alarms --------------------------------------------------------------------------------------------------

WAYS: list[Any] = ["plain DDP", "FSDP2", *product(SCHEDULES, GATHERS)]


def _is_silent(way: Any, num_steps: int) -> None:
    program: Any = partial(train_transformer, None, num_steps)
    if way == "FSDP2":
        program = partial(train_fsdp2, num_steps)
    elif way != "plain DDP":
        overlap = Attached(zerolap_sim.SimAdapter, schedule=way[0], gather=way[1])
        program = partial(train_transformer, overlap, num_steps)
    for loss, reports in run_ranks(2, on_device, program, limit=1500):
        assert reports == [], f"{len(reports)} reports, the first: {reports[0]}"
        assert loss < 4.5, f"no better than guessing one of 50 tokens would be 3.9, it is {loss}"


def test_training_a_transformer_raises_no_alarm() -> None:
    for way in (("interleaved", "lazy"), ("on_step", "eager")):
        _is_silent(way, num_steps=12)


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way if isinstance(way, str) else "-".join(way))
def test_500_iterations_raise_no_alarm(way: Any) -> None:
    _is_silent(way, num_steps=500)


# --- what the checker must find ---------------------------------------------------------------------------------------


def _caught(num_ranks: int, num_runs: int) -> None:
    """A missing synchronisation is found in every run, whatever the timing."""
    num_tried, missed, mutants = 0, [], list(MUTANTS)
    for first in range(0, len(mutants), 4):  # a process can make so many streams and no more
        some = mutants[first : first + 4]
        ranks = run_ranks(num_ranks, on_device, run_mutants, num_runs, some, DELAYS, limit=1500)
        for mutant in ranks[0][0]:
            of_runs = [sum(counts) for counts in zip(*(found[mutant] for found, _ in ranks), strict=True)]
            missed += [f"{mutant}: reports in each run {of_runs}"] if 0 in of_runs else []
            num_tried += 1
    assert missed == []
    assert num_tried == 2 * len(MUTANTS)
    print(
        f"{len(MUTANTS)} of {len(MUTANTS)} caught in each of {num_runs} runs, with and without delays, on {num_ranks} ranks"
    )


def test_every_missing_synchronisation_is_found() -> None:
    assert len(MUTANTS) >= 12
    _caught(2, num_runs=1)


@pytest.mark.soak
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_missing_synchronisation_is_found_in_20_runs(num_ranks: int) -> None:
    _caught(num_ranks, num_runs=20)
