"""ci/check_vendor_api.py as a module: a fixture. The check itself, with the real wheels: tox run -e vendor_api."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from support import ROOT


@pytest.fixture(name="check", scope="module")
def check_vendor_api() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_vendor_api", ROOT / "ci/check_vendor_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
