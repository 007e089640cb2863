"""A name of torch's that the adapter uses and that is not there is found by ci/check_vendor_api.py."""

from __future__ import annotations

from types import ModuleType

import pytest

from support.vendor_api import check_vendor_api  # noqa: F401 - a fixture


def test_what_the_adapter_uses_of_the_installed_torch_is_there(check: ModuleType) -> None:
    findings = check.Findings()
    check.check_cuda(check.source_of("cuda_nccl"), findings)
    assert findings.missing == []
    assert "torch.cuda.is_available in torch" in " ".join(findings.checked)
    assert "dist.ProcessGroupNCCL.Options(is_high_priority_stream=)" in findings.checked
    assert "dist.ProcessGroupNCCL.Options._timeout in torch's stubs" in findings.checked


@pytest.mark.parametrize(
    ("right", "wrong", "missing"),
    [
        ("dist.ProcessGroupNCCL.Options(", "dist.ProcessGroupNCCL.Settings(", "dist.ProcessGroupNCCL.Settings"),
        ("is_high_priority_stream=", "priority=", "dist.ProcessGroupNCCL.Options(priority=)"),
        ("options.group_name", "options.group_title", "dist.ProcessGroupNCCL.Options.group_title"),
        ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_WAIT_BLOCKING", "TORCH_NCCL_WAIT_BLOCKING"),
        ("return advice", "return torch.cuda.advise(advice)", "torch.cuda.advise"),
    ],
)
def test_a_name_that_is_not_there_is_found(check: ModuleType, right: str, wrong: str, missing: str) -> None:
    source = check.source_of("cuda_nccl")
    assert right in source
    findings = check.Findings()
    check.check_cuda(source.replace(right, wrong), findings)
    assert any(found.startswith(missing) for found in findings.missing), findings.missing


def test_an_attribute_that_the_seam_sets_and_is_not_there_is_found(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(check.SETTERS, "set_timeout", "_time_limit")
    findings = check.Findings()
    check.check_cuda(check.source_of("cuda_nccl"), findings)
    assert findings.missing == ["dist.ProcessGroupNCCL.Options._time_limit in torch's stubs"]
