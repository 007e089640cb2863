"""What some versions of torch lack, by name, for tests that need it."""

from __future__ import annotations

import pytest
import torch

NEEDS_MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is there from torch 2.9 on")
