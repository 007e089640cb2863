"""Training through ipex.optimize(), on the CPU build of intel-extension-for-pytorch and the torch it is made for, on 2 Gloo ranks.

`ci/run_tox -e ipex` installs both. The oracle is DDP + what ipex.optimize() has returned, made with the same options.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support.training import assert_same_params
from zerolap_conformance.ranks import run_ranks

pytestmark = pytest.mark.ipex
ADAMW, SGD = (torch.optim.AdamW, {"lr": 0.01, "fused": False}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
PLAIN = {"weights_prepack": False, "fuse_update_step": False}  # what leaves the optimizer as it is


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.LayerNorm(16)
        self.hidden, self.head = nn.Linear(16, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x)).mean((2, 3))
        out: Tensor = self.head(torch.relu(self.hidden(self.norm(x.to(self.norm.weight.dtype)))))
        return out


def _optimized(
    kind: Any, *, dtype: torch.dtype | None = None, model_dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[DDP, Any]:
    """A model and a plain optimizer as ipex.optimize() returns them, and the model in a DDP."""
    ipex = importlib.import_module("intel_extension_for_pytorch")
    torch.manual_seed(0)
    model, (cls, defaults) = Model().to(model_dtype), kind
    model, optimizer = ipex.optimize(model, optimizer=cls(model.parameters(), **defaults), dtype=dtype, **options)
    return DDP(model, bucket_cap_mb=0.004), optimizer


def _step(ddp: DDP, optimizer: Any, number: int, *, autocast: bool) -> None:
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = ddp(x.to(next(ddp.parameters()).dtype)).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _compare(kind: Any, way: str, *, autocast: bool, **options: Any) -> None:
    oracle, plain = _optimized(kind, **options)
    ours, optimizer = _optimized(kind, **options)
    before = [param.detach().clone() for param in ours.parameters()]
    if way == "shard":
        zerolap.shard(ours, optimizer)
    else:
        cls, defaults = kind
        optimizer = zerolap.ZeroRedundancyOptimizer(ours.parameters(), cls, overlap_with_ddp=True, **defaults)
        zerolap.attach(ours, optimizer, schedule="interleaved", gather="lazy")
    for number in range(5):
        _step(oracle, plain, number, autocast=autocast)
        _step(ours, optimizer, number, autocast=autocast)
        assert_same_params(ours, oracle, (kind, way, autocast, options, number))
    assert all(not torch.equal(a, b) for a, b in zip(before, ours.parameters(), strict=True))
    for name, value in oracle.module.state_dict().items():
        assert torch.equal(ours.module.state_dict()[name], value), name


@pytest.mark.parametrize("way", ["shard", "attach"])
@pytest.mark.parametrize("kind", [ADAMW, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("precision", ["fp32", "autocast", "bf16"])
def test_training_gives_the_numbers_of_ddp_and_the_same(precision: str, kind: Any, way: str) -> None:
    model_dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    run_ranks(2, _compare_in, kind, way, precision == "autocast", model_dtype)


def _compare_in(kind: Any, way: str, autocast: bool, model_dtype: torch.dtype) -> None:
    _compare(kind, way, autocast=autocast, model_dtype=model_dtype, **PLAIN)


def _refused(kind: type[Exception], words: str, call: Callable[..., object], *args: Any) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        call(*args)


def _attach(ddp: DDP, cls: Any) -> None:
    zerolap.attach(ddp, zerolap.ZeroRedundancyOptimizer(ddp.parameters(), cls, lr=0.1, overlap_with_ddp=True))


def _try_what_cannot_be() -> None:
    # Its fused step, and its master weights: whole in the optimizer, or split.
    replaced = "was replaced on this optimizer by intel_extension_for_pytorch."
    _refused(TypeError, f"SGD.step {replaced}", zerolap.shard, *_optimized(SGD, weights_prepack=False))
    for kind in (ADAMW, SGD):
        ddp, optimizer = _optimized(kind, dtype=torch.bfloat16, weights_prepack=False)
        _refused(TypeError, replaced, zerolap.shard, ddp, optimizer)
        _refused(ValueError, "has its weights from ipex.optimize(dtype=...)", _attach, ddp, kind[0])
    # Packed weights.
    ddp, _ = _optimized(ADAMW, auto_kernel_selection=True)
    _refused(ValueError, "computes with a packed copy of its weight", _attach, ddp, torch.optim.AdamW)
    # A sharded optimizer that was given to ipex.optimize().
    ipex = importlib.import_module("intel_extension_for_pytorch")
    model = Model()
    zero = zerolap.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1, overlap_with_ddp=True)
    model, zero = ipex.optimize(model, optimizer=zero, inplace=True)
    _refused(TypeError, "ZeroRedundancyOptimizer.state_dict was replaced", zerolap.attach, DDP(model), zero)


def test_what_cannot_be_combined_is_refused_by_name() -> None:
    run_ranks(2, _try_what_cannot_be)


def test_no_index_has_what_the_way_of_older_torches_needs() -> None:
    """Before torch 2.8 Intel GPUs communicated by oneCCL's bindings, which the XPU adapter therefore does not support."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "oneccl-bind-pt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode != 0
    assert "No matching distribution found for oneccl-bind-pt" in done.stderr
