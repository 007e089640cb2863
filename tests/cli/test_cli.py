"""The command line, as a user calls it: real processes, exit codes, and JSON for programs."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel as DDP
from typer.testing import CliRunner

import zerolap
from support import ROOT
from support.training import Mlp, batches, iterate
from zerolap.cli import demo
from zerolap.cli.app import app
from zerolap.cli.skeleton import write
from zerolap_conformance.ranks import run_ranks


def _zerolap(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zerolap", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def test_doctor_trains_on_what_can_be_used_and_says_why_the_rest_cannot() -> None:
    run = _zerolap("doctor", "--try", "--json")
    assert run.returncode == 0, run.stderr
    found = {adapter["name"]: adapter for adapter in json.loads(run.stdout)["adapters"]}
    assert found["cpu_gloo"]["why_unusable"] is None
    assert found["cpu_gloo"]["tried"] == "ok"
    assert found["cpu_gloo"]["devices"] == [f"cpu: {os.cpu_count()} cores"]
    assert found["cuda_nccl"]["devices"] == []
    assert "finds no device" in found["cuda_nccl"]["why_unusable"]
    assert "tried" not in found["cuda_nccl"]
    shown = _zerolap("doctor")
    assert shown.returncode == 0
    assert "pip install 'zerolap-ascend-hccl[npu]'" in shown.stdout, "brackets are not markup"


def test_the_version_is_the_packages() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"zerolap {zerolap.__version__}\n"


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
    assert "no verdict on cpu_gloo: of tier 0 a part was tried, 0 of 1 failed" in run.stdout
    assert "conform at" not in run.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing",), "no adapter 'nothing'; installed: ascend_hccl, cpu_gloo"),
        (("gone:Adapter",), "No module named 'gone'"),
        (("mine:Adapter",), "No module named 'gone'"),
        (("zerolap_cpu_gloo:Gone",), "there is no 'Gone' in zerolap_cpu_gloo"),
        (("cpu_gloo", "--report", "file"), "--report file is a file"),
    ],
)
def test_conformance_says_what_it_cannot_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "mine.py").write_text("import gone\n")
    (tmp_path / "file").touch()
    run = CliRunner().invoke(app, ["conformance", "--adapter", *arguments])
    assert run.exit_code == 2, (arguments, run.output)
    assert words in run.stderr, (arguments, run.stderr)


def test_conformance_says_that_no_requirement_is_like_that(tmp_path: Path) -> None:
    nothing = _zerolap("conformance", "--adapter", "cpu_gloo", "--only", "GONE", folder=tmp_path)
    assert nothing.returncode == 2, nothing.stdout
    assert "no requirement up to tier 3 is like 'GONE'" in nothing.stderr


def test_new_adapter_writes_what_vendors_md_shows(tmp_path: Path) -> None:
    run = _zerolap("new-adapter", "acme", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    page = (ROOT / "VENDORS.md").read_text()
    for kind, name in (("toml", "pyproject.toml"), ("python", "src/zerolap_acme/__init__.py")):
        shown, *_ = re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)
        assert (tmp_path / "zerolap-acme" / name).read_text() == shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("one", "--folder", "one"), "already exists"),
        (("two", "--folder", "one/pyproject.toml"), "is a file, and a folder is needed"),
        (("two", "--folder", "one/pyproject.toml/two"), "Not a directory"),
        (("Bad-Name",), "cannot be a name"),
        (("two", "--device-type", 'x"'), "--device-type is a name of torch's"),
        (("two", "--backend", ""), "--backend is a name of torch's"),
    ],
)
def test_new_adapter_overwrites_nothing_and_takes_no_bad_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "one", name="one", has_streams=False)
    run = CliRunner().invoke(app, ["new-adapter", *arguments])
    assert run.exit_code == 2, (arguments, run.output)
    assert words in run.stderr, (arguments, run.stderr)
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


LINK = ("--bandwidth", "100Gbit", "--latency", "10us")
TIMES = ("--forward", "0.12", "--backward", "240ms")
MODEL = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Embedding(50, 64), *(nn.Linear(64, 64) for _ in range(6)))

def batch():
    return torch.arange(8)

def nothing():
    return 3
"""


def test_plan_forecasts_every_way_and_recommends_one(tmp_path: Path) -> None:
    run = _zerolap("plan", "--params", "7e9", "--world-size", "64", *LINK, *TIMES, "--exchange", "ring")
    assert run.returncode == 0, run.stderr
    assert "on 64 ranks" in run.stdout
    for way in ("DDP", "interleaved, eager", "after_backward, lazy", "on_step, lazy"):
        assert re.search(rf"{way} +\d", run.stdout), run.stdout
    assert re.search(r'schedule="\w+", gather="\w+": ', run.stdout)
    options = ("--param-dtype", "bfloat16", "--master-weights", "--clip", "--json")
    run = _zerolap(
        "plan", "--params", "7e9", "--world-size", "64", *LINK, "--flops", "150T", "--tokens", "4096", *options
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["recommended"]["schedule"] == "on_step"
    num_params, num_ranks = found["num_params"], 64
    assert abs(num_params / 7e9 - 1) < 0.01
    held = {way["schedule"]: way["memory_bytes"] for way in found["ways"]}
    assert abs(held["on_step"]["state"] / (8 * num_params / num_ranks) - 1) < 0.01
    assert abs(held["on_step"]["masters"] / (4 * num_params / num_ranks) - 1) < 0.01
    assert held[None]["state"] > 8 * num_params, "step counts, too"
    assert held[None]["masters"] == 4 * num_params
    assert abs(found["ways"][1]["sent_bytes"] / (2 * 2 * num_params * 63 / 64) - 1) < 0.01


def test_plan_takes_a_model_or_shapes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    shapes = {
        "table": [50, 64],
        **{f"{i}.{kind}": size for i in range(6) for kind, size in (("w", [64, 64]), ("b", [64]))},
    }
    (tmp_path / "shapes.json").write_text(json.dumps(shapes))
    (tmp_path / "list.json").write_text(json.dumps(list(shapes.values())))
    found = []
    for source in (("--model", "mine:make"), ("--shapes", "shapes.json"), ("--shapes", "list.json")):
        options = (
            "--optimizer",
            "SGD",
            "--optimizer-options",
            '{"momentum": 0.9}',
            "--bucket-cap-mb",
            "0.02",
            "--json",
        )
        run = _zerolap("plan", *source, "--world-size", "4", *LINK, *TIMES, *options, folder=tmp_path)
        assert run.returncode == 0, run.stderr
        found.append(json.loads(run.stdout))
    assert found[0]["num_params"] == 50 * 64 + 6 * (64 * 64 + 64)
    assert found[0]["num_buckets"] > 3
    of_model, *of_shapes = ([way["memory_bytes"] for way in each["ways"]] for each in found)
    assert of_shapes == [of_model, of_model]


def test_plan_measures_the_model_on_ranks_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    options = ("--calibrate", "--batch", "mine:batch", "--world-size", "16", "--bandwidth", "1Gbit", "--json")
    run = _zerolap("plan", "--model", "mine:make", *options, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["link"]["bytes_per_second"] == 125e6, "what is given goes before what was measured"
    assert found["link"]["latency"] > 0
    assert 0 < found["compute"]["forward"] < 10
    assert found["compute"]["host_seconds_per_bucket"] > 0
    broken = _zerolap(
        "plan", "--model", "mine:make", "--calibrate", "--batch", "mine:nothing", *options[3:], folder=tmp_path
    )
    assert broken.returncode == 1
    assert "measuring failed" in broken.stderr
    assert "TypeError" in broken.stderr


SOME = ("--params", "1e6", *LINK, *TIMES)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*LINK, *TIMES), "one of --model MODULE:CALLABLE, --shapes FILE or --params NUMBER"),
        (("--params", "1e6", *TIMES), "give the link by --bandwidth"),
        (("--params", "1e6", *LINK), "--forward and --backward"),
        (("--params", "1e6", *LINK, "--forward", "1"), "--forward and --backward"),
        (("--params", "5", *LINK, *TIMES), "from 10000 on"),
        (("--shapes", "bad.json", *LINK, *TIMES), "a JSON list of shapes"),
        (("--shapes", "gone.json", *LINK, *TIMES), "No such file"),
        (("--model", "mine", *LINK, *TIMES), "is MODULE:CALLABLE"),
        (("--model", "gone:make", *LINK, *TIMES), "No module named 'gone'"),
        (("--model", "mine:gone", *LINK, *TIMES), "no callable 'gone'"),
        (("--model", "mine:nothing", *LINK, *TIMES), "not a torch.nn.Module"),
        ((*SOME, "--latency", "fast"), "a time is like"),
        ((*SOME, "--bandwidth", "-3Gbit"), "a bandwidth is like 100Gbit"),
        ((*SOME, "--bandwidth", "1e999Gbit"), "a bandwidth is like 100Gbit"),
        (("--params", "1e6", *LINK, "--flops", "fast", "--tokens", "5"), "--flops is a number of operations"),
        (("--params", "1e6", *LINK, "--flops", "0", "--tokens", "5"), "--flops is a number of operations"),
        (("--shapes", "half.json", *LINK, *TIMES), "a JSON list of shapes"),
        ((*SOME, "--optimizer", "Gone"), "a class of torch.optim"),
        ((*SOME, "--optimizer", "sgd+adamw+muon"), "one class, or two"),
        ((*SOME, "--optimizer", "muon+adamw", "--optimizer-options", "[{}]"), "a list of 2 of them"),
        ((*SOME, "--optimizer", "LBFGS", "--optimizer-options", "[]"), "a JSON object"),
        ((*SOME, "--optimizer", "SGD", "--optimizer-options", '{"lr": -1}'), "cannot step a parameter"),
        ((*SOME, "--param-dtype", "int8"), "floating-point"),
        ((*SOME, "--gather-dtype", "bfloat16"), "add --master-weights"),
        ((*SOME, "--wire", "int4"), "--wire is int8, fp8 or bf16"),
        ((*SOME, "--wire", "int8", "--reduce-dtype", "bfloat16"), "leave out --reduce-dtype"),
        ((*SOME, "--exchange", "tree"), "staged or ring"),
        ((*SOME, "--calibrate"), "--calibrate needs --model and --batch"),
    ],
)
def test_plan_says_what_is_missing_or_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "bad.json").write_text('["x"]')
    (tmp_path / "half.json").write_text("[[2.5]]")
    run = CliRunner().invoke(app, ["plan", "--world-size", "2", *arguments])  # a process each would take a minute
    assert run.exit_code == 2, (arguments, run.output)
    assert words in run.stderr, (arguments, run.stderr)


def test_plan_forecasts_muon_with_adamw() -> None:
    arguments = ["plan", "--params", "25e6", "--world-size", "7", *LINK, *TIMES, "--json"]
    found = {}
    for names in ("adamw", "muon+adamw"):
        run = CliRunner().invoke(app, [*arguments, "--optimizer", names])
        assert run.exit_code == 0, run.output
        found[names] = json.loads(run.stdout)
    (plain, *ours), balance = found["muon+adamw"]["ways"], found["muon+adamw"]["balance"]
    assert found["adamw"]["balance"] == {"state": 1, "work": 1}
    assert 1 < balance["state"] < 1.05
    assert 1 < balance["work"] < 1.05
    assert plain["memory_bytes"]["state"] < 0.7 * found["adamw"]["ways"][0]["memory_bytes"]["state"], "Muon keeps less"
    for way in ours:
        assert way["memory_bytes"]["state"] == pytest.approx(plain["memory_bytes"]["state"] / 7, rel=0.06)
        assert way["step_seconds"] < plain["step_seconds"]
        assert way["sent_bytes"] == pytest.approx(plain["sent_bytes"], rel=0.05)
    said = CliRunner().invoke(app, [*arguments[:-1], "--optimizer", "muon+adamw"]).stdout
    assert "the busiest rank has 1.0" in said


def test_plan_asks_what_is_trained(tmp_path: Path) -> None:
    run = _zerolap("plan", "--world-size", "2", folder=tmp_path)
    assert run.returncode == 2
    assert "say what is trained" in run.stderr


def _save(folder: str) -> None:
    ddp = DDP(Mlp())
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.01)
    zerolap.attach(ddp, zero)
    for x in batches(2):
        iterate(ddp, zero, x)
    zerolap.checkpoint.save(folder, ddp, zero, step=2)


def test_checkpoints_are_inspected_and_converted(tmp_path: Path) -> None:
    run_ranks(2, _save, str(tmp_path / "run"))
    shown = _zerolap("checkpoint", "inspect", "run", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "step 2, saved by 2 ranks" in shown.stdout
    assert "layers.0.weight (40, 13)" in shown.stdout
    assert json.loads(_zerolap("checkpoint", "inspect", "run", "--json", folder=tmp_path).stdout)["ranks"] == 2
    assert _zerolap("checkpoint", "convert", "run", "one.pt", folder=tmp_path).returncode == 0
    assert _zerolap("checkpoint", "convert", "run", "one.pt", folder=tmp_path).returncode == 2, "it is there already"
    for arguments, words in (
        (("no/such/one.pt",), "there is no folder"),
        (("two.pt", "--step", "3"), "--step is for a file"),
    ):
        target, *options = arguments
        refused = CliRunner().invoke(
            app, ["checkpoint", "convert", f"{tmp_path}/run", f"{tmp_path}/{target}", *options]
        )
        assert refused.exit_code == 2, refused.output
        assert words in refused.stderr
    back = _zerolap("checkpoint", "convert", "one.pt", "back", "--json", folder=tmp_path)
    assert json.loads(back.stdout) == {"written": ["back/step-000000002"]}, back.stderr
    assert torch.load(tmp_path / "one.pt", weights_only=True)["optimizer"]["param_groups"][0]["lr"] == 0.01
    damaged = tmp_path / "back/step-000000002/.metadata"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    run = _zerolap("checkpoint", "inspect", "back", folder=tmp_path)
    assert run.returncode == 1
    assert "is damaged" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("inspect", "gone"), 2, "gone does not exist"),
        (("inspect", "empty"), 2, "empty has no complete checkpoint"),
        (("inspect", "file"), 2, "file is a file; a sharded checkpoint is a folder"),
        (("convert", "gone", "new"), 2, "gone does not exist"),
        (("convert", "empty", "new"), 2, "empty has no complete checkpoint"),
        (("convert", "whole.pt", "file"), 2, "file is a file; sharded checkpoints go to a folder"),
        (("convert", "whole.pt", "new", "--step", "-1"), 2, "--step"),
        (("convert", "file", "new"), 1, "file cannot be loaded safely: UnreadableError"),
    ],
)
def test_what_is_no_checkpoint_is_told_apart_from_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    torch.save({"model": {}, "optimizer": {"state": {}, "param_groups": []}}, tmp_path / "whole.pt")
    run = CliRunner().invoke(app, ["checkpoint", *arguments])
    assert run.exit_code == code, (arguments, run.output)
    assert words in run.stderr, (arguments, run.stderr)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "whole.pt"]


def test_the_demo_finds_the_same_numbers(tmp_path: Path) -> None:
    run = _zerolap("demo", "--rounds", "1", "--json", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["largest_difference"] == 0
    plain, ours = found["contestants"]
    assert plain["loss"] == ours["loss"]
    assert ours["state_bytes"] < 0.51 * plain["state_bytes"]
    # By whatever way: 2P(n-1)/n elements of 4 bytes, on 2 ranks.
    for contestant in (plain, ours):
        assert contestant["sent_bytes"] == pytest.approx(4 * found["parameters"], rel=1e-3)


def test_the_demo_tells_what_was_sent_from_what_went_over_the_network() -> None:
    contestants = [
        {"name": name, "loss": 1.0, "state_bytes": 2e6, "sent_bytes": 3e6, "network_bytes": network, "seconds": 0.1}
        for name, network in (("DDP + AdamW", 3.1e6), ("zerolap", 2e3))
    ]
    console = Console(record=True, width=120, file=io.StringIO())
    demo.show(console, {"contestants": contestants, "largest_difference": 0, "time_ratios": [1.0]})
    rows = {
        cells[0].strip(): cells[1:]
        for line in console.export_text().splitlines()
        if len(cells := line.split("│")[1:-1]) == 4
    }
    assert [cell.strip() for cell in rows["sent, MB per rank and step"]] == ["3.00", "3.00", "1.00"]
    assert [cell.strip() for cell in rows["of that over the network"]] == [
        "3.10",
        "0.00",
        "0.00",
    ]


def test_the_benchmark_runs_from_the_source_tree_and_says_so_elsewhere(tmp_path: Path) -> None:
    options = ["--model", "many", "--rounds", "1", "--steps", "1", "--only", "zerolap interleaved eager, 5 MB"]
    run = _zerolap("bench", "--json", *options, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "zerolap interleaved eager, 5 MB" in [row["name"] for row in json.loads(run.stdout)["rows"]]
    assert not list(tmp_path.iterdir())
    shutil.copytree(ROOT / "core/src/zerolap", tmp_path / "a/b/c/zerolap")  # as if it were installed
    code = "from zerolap.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "a/b/c")}
    elsewhere = subprocess.run(
        [sys.executable, "-P", "-c", code, "bench"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert elsewhere.returncode == 2, elsewhere.stdout
    assert "clone the repository" in elsewhere.stderr


def _in_bash(script: str, **variables: str) -> str:
    """As a user's shell runs it, with the installed command."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **variables}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_shell_completes_commands_and_options(tmp_path: Path) -> None:
    script = _in_bash("zerolap --show-completion; true")
    assert "complete -o default -F _zerolap_completion zerolap" in script
    # What bash itself does when Tab is pressed, with that script.
    press = "COMP_WORDS=(zerolap {0}); COMP_CWORD={1}; _zerolap_completion zerolap; printf '%s ' \"${{COMPREPLY[@]}}\""
    assert _in_bash(script + press.format("d", 1)).split() == ["doctor", "demo"]
    assert "--json" in _in_bash(script + press.format("doctor --", 2)).split()
    _in_bash("zerolap --install-completion; true", HOME=str(tmp_path))
    assert "zerolap" in (tmp_path / ".bashrc").read_text()
    assert "_zerolap_completion" in (tmp_path / ".bash_completions/zerolap.sh").read_text()


def test_without_torch_it_says_what_is_missing(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    python = str(tmp_path / "env/bin/python")

    def call(*paths: str, command: str = "doctor") -> list[subprocess.CompletedProcess[str]]:
        """As the installed command does it, and by -m."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "core/src"), *paths))}
        ways = (["-c", "from zerolap.cli import main; main()"], ["-m", "zerolap"])
        return [
            subprocess.run([python, *way, command], env=environment, capture_output=True, text=True) for way in ways
        ]

    for bare in call():
        assert bare.returncode == 1
        assert "pip install 'zerolap[cli]'" in bare.stderr
    import rich

    site, some = Path(rich.__file__).parent.parent, tmp_path / "some"
    some.mkdir()
    for path in site.iterdir():  # everything that is installed here, but for torch and what needs it
        if not path.name.lower().startswith(("torch", "functorch", "zerolap", "_zerolap")) and path.suffix != ".pth":
            (some / path.name).symlink_to(path)
    for run in call(str(some)):
        assert run.returncode == 1, run.stderr
        assert "torch is missing" in run.stdout, run.stdout + run.stderr
    for run in call(str(some), command="demo"):
        assert run.returncode == 1, run.stdout
        assert "this needs torch; pip install torch" in run.stderr
    importing = [
        python,
        "-c",
        f"import sys; sys.path.insert(0, {str(ROOT / 'core/src')!r}); import zerolap; zerolap.attach",
    ]
    assert "No module named 'torch'" in subprocess.run(importing, capture_output=True, text=True).stderr
