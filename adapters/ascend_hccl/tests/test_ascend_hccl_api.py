"""A name of torch_npu's that the adapter uses and that is not there is found by ci/check_vendor_api.py."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.vendor_api import check_vendor_api  # noqa: F401 - a fixture


def test_an_attribute_that_the_seam_sets_and_is_not_there_is_found(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(check.SETTERS, "set_timeout", "_time_limit")
    findings = check.Findings()
    check.check_cuda(check.source_of("cuda_nccl"), findings)
    assert findings.missing == ["dist.ProcessGroupNCCL.Options._time_limit in torch's stubs"]


MAKER = """
def _new_process_group_hccl_helper(dist_backend_opts, pg_options):
    return make(dist_backend_opts.store, dist_backend_opts.group_rank, dist_backend_opts.{asked})
"""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A package laid out as the vendor's is, with what the adapter needs and no more."""
    files = {
        "torch_npu/__init__.py": "from torch_npu.version import __version__ as __version__\n",
        "torch_npu/version.py": "__version__ = '2.13.0'\n",
        "torch_npu/npu/__init__.py": "from .utils import *\ndef is_available(): ...\n",
        "torch_npu/npu/utils.py": "def device_count(): ...\ndef synchronize(device=None): ...\n",
        "torch_npu/registry.py": 'torch._register_device_module("npu", torch_npu.npu)\n'
        + MAKER.format(asked="timeout"),
        "torch_npu/lib/libtorch_npu.so": "TORCH_HCCL_HIGH_PRIORITY TORCH_HCCL_ASYNC_ERROR_HANDLING TORCH_HCCL_BLOCKING_WAIT",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_vendors_sources_are_read_without_importing_them(check: ModuleType, wheel: Path) -> None:
    findings = check.Findings()
    check.check_npu(check.source_of("ascend_hccl"), wheel, findings)
    assert findings.missing == []
    assert "torch_npu" not in sys.modules


@pytest.mark.parametrize(
    ("file", "old", "new", "missing"),
    [
        ("npu/__init__.py", "is_available", "is_usable", "torch.npu.is_available"),
        ("npu/utils.py", "device_count", "count_devices", "torch.npu.device_count"),
        ("registry.py", "dist_backend_opts.timeout", "dist_backend_opts.deadline", "is given deadline"),
        ("lib/libtorch_npu.so", "HIGH_PRIORITY", "LOW_PRIORITY", "TORCH_HCCL_HIGH_PRIORITY"),
    ],
)
def test_a_name_that_a_vendor_renames_is_found(
    check: ModuleType, wheel: Path, file: str, old: str, new: str, missing: str
) -> None:
    path = wheel / "torch_npu" / file
    path.write_text(path.read_text().replace(old, new))
    findings = check.Findings()
    check.check_npu(check.source_of("ascend_hccl"), wheel, findings)
    assert any(missing in found for found in findings.missing), findings.missing


def test_a_call_with_a_parameter_that_is_not_there_is_found(check: ModuleType, wheel: Path) -> None:
    findings = check.Findings()
    source = check.source_of("ascend_hccl") + "\ntorch.npu.synchronize(device=0)\ntorch.npu.synchronize(stream=0)\n"
    check.check_npu(source, wheel, findings)
    assert findings.missing == ["torch.npu.synchronize(stream=) in torch_npu.npu"]
