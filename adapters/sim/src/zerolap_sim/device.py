"""The module that torch knows as ``torch.<name>``: what DDP, FSDP2, autograd and checkpointing look for on a device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch

from zerolap._torch import spare_device_name, under
from zerolap_sim import _extension

_initialized = True  # checkpointing asks for this before it saves the generator's state

Stream = torch.Stream
StreamContext = torch.Stream
is_autocast_available = True


def _type() -> str:
    return spare_device_name()


def _index(device: torch.device | str | int | None) -> int:
    if device is None:
        return _extension.current_device()
    if isinstance(device, int):
        return device if device >= 0 else _extension.current_device()
    index = torch.device(device).index
    return _extension.current_device() if index is None else index


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    """Nothing is left to do after ``zerolap_sim.install()``."""


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return _extension.has_failed()


def device_count() -> int:
    return _extension.device_count()


def current_device() -> int:
    return _extension.current_device()


def set_device(device: torch.device | str | int) -> None:
    _extension.exchange_device(_index(device))


def get_device_name(device: torch.device | str | int | None = None) -> str:
    return "zerolap simulated device"


def get_device_capability(device: torch.device | str | int | None = None) -> tuple[int, int]:
    return (0, 0)


class device:  # noqa: N801 - torch.cuda.device is spelled like this
    """Makes a device current inside a with block."""

    def __init__(self, device: torch.device | str | int | None) -> None:
        self._index = _index(device)
        self._before = -1

    def __enter__(self) -> None:
        self._before = _extension.exchange_device(self._index)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        _extension.exchange_device(self._before)


class device_of(device):  # noqa: N801 - as above
    """Makes the device of a tensor current inside a with block."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device.index if tensor.device.type == _type() else None)


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:  # noqa: N802 - as torch.cuda.Event is
    """A ``torch.Event`` of this device; not a subclass, because ``elapsed_time`` refuses those."""
    return torch.Event(torch.device(_type()), enable_timing=enable_timing)


def stream(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    """Makes a stream current inside a with block; None changes nothing."""
    return nullcontext() if stream is None else under(stream)


def current_stream(device: torch.device | str | int | None = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: torch.device | str | int | None = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=_device_type_number())


def _device_type_number() -> int:
    return torch.accelerator.current_stream().device_type


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def synchronize(device: torch.device | str | int | None = None) -> None:
    torch.accelerator.synchronize(_index(device))


# The device draws from the CPU's generator, so torch.manual_seed has done it all by the time it calls these.
def manual_seed(seed: int) -> None:
    """The CPU's generator serves this device."""


manual_seed_all = manual_seed


def initial_seed() -> int:
    return torch.initial_seed()


def get_rng_state(device: torch.device | str | int | None = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: torch.device | str | int | None = None) -> None:
    torch.set_rng_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [torch.get_rng_state()] * device_count()


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])


def empty_cache() -> None:
    """No memory is cached."""


def memory_allocated(device: torch.device | str | int | None = None) -> int:
    return _extension.bytes_in_use(_index(device))


def max_memory_allocated(device: torch.device | str | int | None = None) -> int:
    return _extension.peak_bytes(_index(device))


def memory_reserved(device: torch.device | str | int | None = None) -> int:
    return memory_allocated(device)


def reset_peak_memory_stats(device: torch.device | str | int | None = None) -> None:
    _extension.reset_peak(_index(device))


def memory_stats(device: torch.device | str | int | None = None) -> dict[str, Any]:
    return {
        "allocated_bytes.all.current": memory_allocated(device),
        "allocated_bytes.all.peak": max_memory_allocated(device),
    }


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    return True
