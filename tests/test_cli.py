"""The command line, as a user calls it: real processes, exit codes, and JSON for programs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from zerolap_cli.skeleton import write

ROOT = Path(__file__).parent.parent


def _zerolap(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zerolap", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def test_doctor_trains_on_what_can_be_used_and_says_why_the_rest_cannot() -> None:
    run = _zerolap("doctor", "--try", "--json")
    assert run.returncode == 0, run.stderr
    found = {adapter["name"]: adapter for adapter in json.loads(run.stdout)["adapters"]}
    assert found["cpu_gloo"]["why_unusable"] is None
    assert found["cpu_gloo"]["tried"] == "ok"
    assert "finds no device" in found["cuda_nccl"]["why_unusable"]
    assert "tried" not in found["cuda_nccl"]
    shown = _zerolap("doctor")
    assert shown.returncode == 0
    assert "pip install 'zerolap-ascend-hccl[npu]'" in shown.stdout, "brackets are not markup"


def test_conformance_gives_the_verdict_of_the_suite(tmp_path: Path) -> None:
    run = _zerolap("conformance", "--adapter", "cpu_gloo", "--tier", "0", "--report", "out", "--json", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == json.loads((tmp_path / "out/verdict.json").read_text())
    assert "cpu_gloo conforms at tier 0 on 2 ranks" in run.stderr
    assert "DEV-1" in (tmp_path / "out/junit.xml").read_text()


def test_conformance_of_a_part_is_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")  # somebody else's
    run = _zerolap("conformance", "--adapter", "cpu_gloo", "--tier", "0", "--only", "DEV-2", folder=tmp_path)
    assert run.returncode == 1, run.stdout
    assert "does not conform at tier 0" in run.stdout
    assert _zerolap("conformance", "--adapter", "nothing", "--only", "DEV-2", folder=tmp_path).returncode == 1


def test_new_adapter_writes_what_vendors_md_shows(tmp_path: Path) -> None:
    run = _zerolap("new-adapter", "acme", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    page = (ROOT / "VENDORS.md").read_text()
    for kind, name in (("toml", "pyproject.toml"), ("python", "src/zerolap_acme/__init__.py")):
        (shown,) = re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)
        assert (tmp_path / "zerolap-acme" / name).read_text() == shown


def test_new_adapter_overwrites_nothing_and_takes_no_bad_name(tmp_path: Path) -> None:
    write(tmp_path / "one", name="one", has_streams=False)
    for arguments, words in (
        (("one", "--folder", "one"), "is there already"),
        (("Bad-Name",), "cannot be a name"),
    ):
        run = _zerolap("new-adapter", *arguments, folder=tmp_path)
        assert run.returncode == 2
        assert words in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_new_adapter_works_once_its_names_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, name="mine", device_type="cpu", backend="gloo", has_streams=False)
    source = (tmp_path / "src/zerolap_mine/__init__.py").read_text().replace("exact_cut=1", "exact_cut=64")
    making = "\n    def make_backend(self, spec):\n        return dist.ProcessGroupGloo(spec.store, spec.rank, spec.size, spec.timeout)\n"
    source = source.replace("from zerolap", "import torch.distributed as dist\nfrom zerolap", 1) + making
    (tmp_path / "src/zerolap_mine/__init__.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "src"))
    run = _zerolap("conformance", "--adapter", "zerolap_mine:MineAdapter", "--tier", "1", folder=tmp_path)
    assert run.returncode == 0, run.stdout


def test_without_torch_it_says_what_is_missing(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    python = str(tmp_path / "env/bin/python")

    def call(*paths: str) -> subprocess.CompletedProcess[str]:
        code = "import sys; sys.path += sys.argv[1:]; sys.argv = ['zerolap', 'doctor']; import zerolap_cli; zerolap_cli.main()"
        return subprocess.run([python, "-c", code, str(ROOT / "core/src"), *paths], capture_output=True, text=True)

    bare = call()
    assert bare.returncode == 1
    assert "pip install 'zerolap[cli]'" in bare.stderr
    import rich

    site, some = Path(rich.__file__).parent.parent, tmp_path / "some"
    some.mkdir()
    for path in site.iterdir():  # everything that is installed here, but for torch and what needs it
        if not path.name.lower().startswith(("torch", "functorch", "zerolap", "_zerolap")) and path.suffix != ".pth":
            (some / path.name).symlink_to(path)
    run = call(str(some))
    assert run.returncode == 1, run.stderr
    assert "torch is missing" in run.stdout, run.stdout + run.stderr
