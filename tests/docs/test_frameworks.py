"""Where a framework is not installed: the package of integrations says what to install, and the docs name what was tried."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

from support import ROOT

INTEGRATIONS = ("lightning", "pytorch_lightning", "accelerate", "transformers")


@pytest.mark.parametrize("framework", INTEGRATIONS)
def test_a_framework_that_is_missing_is_named_with_how_to_install_it(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == framework else found(name))
    monkeypatch.delitem(sys.modules, f"zerolap_integrations.{framework}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install {framework.replace('_', '-')}$") as caught:
        importlib.import_module(f"zerolap_integrations.{framework}")
    assert caught.value.name == framework


def test_the_package_alone_imports_no_framework() -> None:
    before = {name.partition(".")[0] for name in sys.modules}
    importlib.import_module("zerolap_integrations")
    after = {name.partition(".")[0] for name in sys.modules}
    assert not (after - before) & set(INTEGRATIONS)


def test_docs_name_the_versions_that_the_tests_use() -> None:
    page = (ROOT / "docs/integrations.md").read_text()
    pinned = dict(
        line.split("==") for line in (ROOT / "ci/constraints-integrations.txt").read_text().splitlines() if "==" in line
    )
    for name in ("lightning", "accelerate", "transformers", "peft", "trl"):
        assert f"{name} {pinned[name]}" in page or f"to {pinned[name]}" in page, name
