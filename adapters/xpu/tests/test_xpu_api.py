"""What the adapter uses of the installed torch is there, by ci/check_vendor_api.py."""

from __future__ import annotations

from types import ModuleType

import pytest

from support.vendor_api import check_vendor_api  # noqa: F401 - a fixture
from zerolap._torch import Backend


def test_what_the_adapter_uses_of_the_installed_torch_is_there(check: ModuleType) -> None:
    if not hasattr(Backend.Options, "global_ranks_in_group"):  # XCCL's options inherit it
        pytest.skip("the XCCL of this torch takes no ranks of a group")
    findings = check.Findings()
    check.check_xpu(check.source_of("xpu"), findings)
    assert findings.missing == []
    assert "torch.xpu.is_available in torch" in " ".join(findings.checked)
    assert "dist.ProcessGroupXCCL.Options._timeout in torch's stubs" in findings.checked
