"""docs/api.md says what is public, as it is now."""

from __future__ import annotations

import importlib.util
import inspect
import re
from types import ModuleType

import pytest

import zerolap
from support import ROOT
from zerolap import checkpoint


@pytest.fixture
def draw_api() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_api", ROOT / "ci/draw_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_every_public_name_with_its_parameters_and_is_current(draw_api: ModuleType) -> None:
    written = draw_api.PAGE.read_text()
    assert draw_api.page(draw_api.since_of(written)) == (written, set()), "run python ci/draw_api.py"
    names = [*zerolap.__all__, *(f"checkpoint.{name}" for name in checkpoint.__all__)]
    assert sorted(re.findall(r"^### `([\w.]+)`", written, re.MULTILINE)) == sorted(names)
    # As Python sees it, not as the page was made.
    for name in (name for name in names if inspect.isfunction(getattr(zerolap, name, None))):
        (shown,) = re.findall(rf"^```text\n{name}(\(.*?)\n```", written, re.MULTILINE | re.DOTALL)
        for parameter in inspect.signature(getattr(zerolap, name)).parameters:
            assert re.search(rf"\b{parameter}: ", shown), f"{name} has {parameter}, the page has {shown}"


def _attach(ddp: object, *, speed: int = 3) -> None:
    """Another one."""


def test_a_page_goes_stale_with_a_parameter_and_versions_stay(
    draw_api: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = draw_api.PAGE.read_text().replace("### `attach`, since 0.1.0", "### `attach`, since 0.0.7")
    assert draw_api.page(draw_api.since_of(written)) == (written, set())
    monkeypatch.setattr(zerolap, "attach", _attach)
    fresh, _ = draw_api.page(draw_api.since_of(written))
    assert "### `attach`, since 0.0.7\n\n```text\nattach(ddp: object, *, speed: int=3) -> None\n```" in fresh


def test_a_name_that_goes_is_noticed(draw_api: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    since = draw_api.since_of(draw_api.PAGE.read_text())
    monkeypatch.delattr(zerolap.Handle, "audit")
    _, gone = draw_api.page(since)
    assert gone == {"Handle.audit"}
    monkeypatch.setattr(zerolap, "__all__", [name for name in zerolap.__all__ if name != "Stats"])
    with pytest.raises(SystemExit, match=r"differ by .*Stats"):
        draw_api.page(since)
