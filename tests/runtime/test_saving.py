"""Parameters that lie in flat buffers look, to whoever saves or copies them, like parameters with memory of their own."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
import zerolap.runtime.flat_buffer as shards
from support.ranks import on_ranks
from support.training import HOOK_MAKERS, SMALL_BUCKETS, assert_same_params, backward, batches, overlapped
from zerolap.runtime.flat_buffer import FlatBuffer


class Mixed(nn.Module):
    """Two dtypes, strides of three kinds, one weight used twice, and parameters of one and of no element."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, padding=1).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(17, 24).t())
        self.low = nn.Linear(17, 17).to(torch.bfloat16)
        self.tied = nn.Linear(17, 17, bias=False)
        self.again = self.tied
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).flatten(2).transpose(1, 2).reshape(-1, 24)
        x = self.low((x @ self.turned).bfloat16()).float()
        return self.again(torch.tanh(self.tied(x))) * self.scale + self.empty.sum()


def _saved_bytes(value: object) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return file.tell()


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif hasattr(value, "items"):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _assert_standalone(value: object, what: str, *, fewest: int) -> None:
    """Every tensor of it has a storage that is its own, and as large as itself."""
    tensors = {id(tensor): tensor for tensor in _tensors(value)}.values()
    assert len(tensors) >= fewest, what
    storages = [tensor.untyped_storage() for tensor in tensors]
    for tensor, storage in zip(tensors, storages, strict=True):
        assert storage.nbytes() == tensor.nbytes, f"{what}: {tuple(tensor.shape)} drags {storage.nbytes()} bytes along"
    addresses = [storage.data_ptr() for storage in storages if storage.nbytes()]
    assert len(set(addresses)) == len(addresses), f"{what}: two tensors share a storage"


def _attached(schedule: str, gather: str, **options: Any) -> Callable[[DDP], Any]:
    def make(ddp: DDP) -> Any:
        opt = zerolap.ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.AdamW, lr=1e-2, fused=False, overlap_with_ddp=True
        )
        zerolap.attach(ddp, opt, schedule=schedule, gather=gather, **options)  # type: ignore[arg-type]
        return opt

    return make


def _hooked(ddp: DDP) -> Any:
    return overlapped(ddp, ddp.parameters(), torch.optim.AdamW, hook_maker=HOOK_MAKERS[1], lr=1e-2)


def _bucket_view(ddp: DDP) -> Any:
    made = []
    for dtype in (torch.float32, torch.bfloat16):  # without overlap an optimizer has one dtype
        params = [param for param in ddp.parameters() if param.dtype is dtype]
        made.append(zerolap.ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=1e-2, parameters_as_bucket_view=True))
    return made


WAYS: dict[str, Callable[[DDP], Any]] = {
    "attach": _attached("interleaved", "eager"),
    "attach, lazy": _attached("on_step", "lazy"),
    "attach, masters": _attached("after_backward", "eager", master_weights=True),
    "hook": _hooked,
    "bucket view": _bucket_view,
}


def _train(ddp: DDP, optimizers: list[Any], num: int) -> None:
    for x in batches(num, (2, 4, 12, 12)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(ddp, x)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_parameter_is_saved_and_copied_as_if_its_memory_were_its_own(way: str) -> None:
    torch.manual_seed(0)
    ddp = DDP(Mixed(), bucket_cap_mb=SMALL_BUCKETS)
    made = WAYS[way](ddp)
    optimizers = made if isinstance(made, list) else [made]
    _train(ddp, optimizers, 3)
    module = ddp.module
    params = dict(module.named_parameters())

    _assert_standalone(params, "named_parameters()", fewest=9)
    saved = module.state_dict()
    assert saved.pop("again.weight").untyped_storage().data_ptr() == saved["tied.weight"].untyped_storage().data_ptr()
    _assert_standalone(saved, "state_dict()", fewest=9)
    _assert_standalone([param.detach() for param in params.values()], "detach()", fewest=9)
    own = {name: param.detach().clone(memory_format=torch.preserve_format) for name, param in params.items()}
    for name, param in params.items():
        assert param.stride() == own[name].stride(), name
        assert _saved_bytes(param.detach()) == _saved_bytes(own[name]), name
        assert _saved_bytes(param) == _saved_bytes(nn.Parameter(own[name], param.requires_grad)), name
        assert pickle.loads(pickle.dumps(param.detach())).untyped_storage().nbytes() == param.nbytes, name
        assert copy.deepcopy(param.detach()).untyped_storage().nbytes() == param.nbytes, name
    assert _saved_bytes(module.state_dict()) <= _saved_bytes(own) + 2000
    _assert_standalone(dict(copy.deepcopy(module).named_parameters()), "deepcopy", fewest=9)
    loaded = Mixed()
    loaded.load_state_dict(copy.deepcopy(module.state_dict()))
    assert_same_params(loaded, module, "loaded")

    for optimizer in optimizers:
        _assert_standalone(dict(optimizer.optim.state), ".optim.state", fewest=1)
        optimizer.consolidate_state_dict(to=1)
        if optimizer.rank == 1:
            _assert_standalone(optimizer.state_dict()["state"], "state_dict() of the optimizer", fewest=4)
    if way != "bucket view":
        sharded = optimizers[0].sharded_state_dict(module)["state"]
        assert _saved_bytes(sharded) < 2 * sum(param.nbytes for param in params.values()) + 40_000
    _train(ddp, optimizers, 2)  # they are still what training updates


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.uint8, torch.int64, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_flat_buffer_and_its_parameters_are_the_same_memory_in_every_dtype(dtype: torch.dtype) -> None:
    values = [torch.randint(0, 2, shape).to(dtype) for shape in ((3, 5), (), (0, 2), (2, 3, 4, 4), (129,))]
    values[3] = values[3].contiguous(memory_format=torch.channels_last)
    given = [value.clone(memory_format=torch.preserve_format) for value in values]
    flat = FlatBuffer(given)
    assert flat.is_intact()
    for place, (tensor, value) in enumerate(zip(given, values, strict=True)):
        assert torch.equal(tensor.to(torch.complex128), value.to(torch.complex128))
        assert tensor.stride() == value.stride()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        if tensor.numel():
            assert tensor.data_ptr() == flat.piece(place, 0, tensor.numel()).data_ptr()
    flat.buffer.zero_()
    assert not any(tensor.to(torch.complex128).any() for tensor in given)
    assert flat.is_intact()
    given[-1].data = values[-1]
    assert not flat.is_intact()


def test_a_device_whose_storages_cannot_be_cut_keeps_views_and_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(view: Tensor) -> Tensor:
        raise RuntimeError("not on this device")

    monkeypatch.setattr(shards, "_with_own_storage", refuse)
    with caplog.at_level("WARNING", logger="zerolap"):
        assert not shards._can_cut_storages.__wrapped__("cpu")
    assert "not on this device" in caplog.text
    monkeypatch.setattr(shards, "_can_cut_storages", lambda device_type: False)
    params = [torch.ones(3), torch.ones(5)]
    flat = FlatBuffer(params)
    params[1].mul_(2)
    assert flat.is_intact()
    assert flat.piece(1, 0, 5).tolist() == [2] * 5
