"""What some versions of torch lack, by name, for tests that need it."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

NEEDS_MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is there from torch 2.9 on")


def needs_ddp_option(name: str) -> pytest.MarkDecorator:
    is_there = name in inspect.signature(DistributedDataParallel.__init__).parameters
    return pytest.mark.skipif(not is_there, reason=f"DDP of this torch has no {name}")
