"""The adapter against a torch that is built with NCCL, on a machine without a GPU: what needs no device is made and called."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zerolap import GroupSpec, load_adapter

pytestmark = pytest.mark.skipif(
    not hasattr(dist, "ProcessGroupNCCL"), reason="this torch is built without ProcessGroupNCCL"
)


def _spec() -> GroupSpec:
    return GroupSpec(store=dist.HashStore(), rank=0, global_ranks=[3, 5], timeout=timedelta(seconds=7), name="own")  # type: ignore[arg-type]


def test_real_options_take_and_keep_what_the_adapter_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Recorder:
        Options = dist.ProcessGroupNCCL.Options

        def __init__(self, *args: Any) -> None:
            made.append(args)

    spec = _spec()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Recorder)
    load_adapter("cuda_nccl").make_backend(spec)
    ((store, rank, size, options),) = made
    assert (store, rank, size) == (spec.store, 0, 2)
    assert isinstance(options, Recorder.Options)
    assert options.is_high_priority_stream is True
    assert options._timeout == timedelta(seconds=7)
    assert (options.group_name, list(options.global_ranks_in_group)) == ("own", [3, 5])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run the conformance suite on it")
def test_the_real_group_takes_the_arguments_and_lacks_the_device_only() -> None:
    with pytest.raises(ValueError, match=r"ProcessGroupNCCL is only supported with GPUs"):
        load_adapter("cuda_nccl").make_backend(_spec())
    with pytest.raises(TypeError, match="incompatible"):  # as it would be, were they not of the right kinds
        dist.ProcessGroupNCCL("store", 0, 2, dist.ProcessGroupNCCL.Options())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run the conformance suite on it")
def test_the_adapter_says_what_is_missing_and_nothing_is_initialised() -> None:
    adapter = load_adapter("cuda_nccl")
    assert adapter.why_unavailable() == "torch.cuda finds no device"
    assert isinstance(adapter.diagnose(), list)
    assert dist.is_backend_available("nccl")
    assert dist.BackendConfig(dist.Backend("nccl")).get_device_backend_map() == {"cuda": "nccl"}
    assert not torch.cuda.is_initialized()


def test_streams_and_events_are_torchs_generic_ones() -> None:
    assert issubclass(torch.cuda.Stream, torch.Stream)
    assert issubclass(torch.cuda.Event, torch.Event)
    event = torch.Event(device=torch.device("cuda"), enable_timing=True)
    assert event.device.type == "cuda"
    for name in (
        "wait_stream",
        "wait_event",
        "record_event",
        "synchronize",
        "stream_id",
        "device_index",
        "device_type",
    ):
        assert hasattr(torch.Stream, name), name
    for name in ("record", "synchronize", "elapsed_time", "wait"):
        assert hasattr(torch.Event, name), name
    assert isinstance(torch.futures.Future(devices=[torch.device("cuda", 0)]), torch.futures.Future)
