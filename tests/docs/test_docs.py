"""The code in the docs runs as it stands, and its commands are real.

A comment before a block says what it starts from: ``<!-- test: NAME -->`` begins anew with that prelude (see ``prelude``), and
``<!-- test: NAME needs MODULE -->`` does so where the module is installed. Without one a block goes on where the page's last one ended.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.run import get_args_parser
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support import ROOT
from support.synthetic_runs import run_of
from support.training import Mlp, batches
from zerolap.observe.timeline import write
from zerolap_conformance.ranks import run_ranks

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it along

PAGES = [str(path.relative_to(ROOT)) for path in (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")))]
LANGUAGES = ("python", "sh", "toml", "json", "yaml", "text")  # text: output, or anything that nothing can check


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    note: str  # of the comment before it

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def shown_files(self) -> list[str]:
        """The files that a block shows instead of code of its own."""
        return re.findall(r'^\s*--8<-- "([^":]+)', self.text, re.MULTILINE)


def blocks_of(page: str, text: str) -> list[Block]:
    """Every fenced block, also inside lists and notes."""
    found: list[Block] = []
    fence, note, begun, inside, language = "", "", 0, list[str](), ""
    for number, line in enumerate(text.splitlines(), 1):
        opening = re.match(r"\s*(`{3,}|~{3,})\s*(\S*)", line)
        if fence:
            if opening and opening[1].startswith(fence) and not opening[2]:
                body = dedent("\n".join(inside)) + "\n"
                found.append(Block(page=page, line=begun, language=language, text=body, note=note))
                fence, note, inside = "", "", []
            else:
                inside.append(line)
        elif opening:
            fence, language, begun = opening[1], opening[2], number
        elif line.strip():
            comment = re.fullmatch(r"\s*<!-- test: (.+) -->\s*", line)
            note = comment[1] if comment else ""
    assert not fence, f"{page}: the block of line {begun} does not end"
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page, (ROOT / page).read_text())]


def test_every_block_says_what_it_is() -> None:
    unknown = [f"{b.place}: {b.language or 'no language'}" for b in BLOCKS if b.language not in LANGUAGES]
    assert not unknown, f"a block is one of {LANGUAGES}, so that it is run, checked, or known to be output: {unknown}"
    assert len([b for b in BLOCKS if b.language == "python"]) > 6


def test_blocks_are_found_wherever_they_are() -> None:
    text = "* item\n\n    ```python\n    a = 1\n    ```\n\n<!-- test: wrapped -->\n\n````sh\n```\n````\n\n~~~\nx\n~~~\n"
    found = [(b.line, b.language, b.text, b.note) for b in blocks_of("page", text)]
    assert found == [(3, "python", "a = 1\n", ""), (9, "sh", "```\n", "wrapped"), (13, "", "x\n", "")]


# --- python ---------------------------------------------------------------------------------------------------------------


def prelude(name: str, folder: str) -> dict[str, Any]:
    """What a block finds: ``plain`` a model and data, ``wrapped`` DDP and an optimizer, too, ``attached`` and ``on_step`` all of it."""
    names: dict[str, Any] = {
        **{"torch": torch, "dist": dist, "DDP": DDP, "zerolap": zerolap, "folder": folder, "plain": f"{folder}/plain"},
        **{"model": Mlp(), "loader": list(batches(3)), "loss_of": lambda out: out.square().sum()},
        **{"batch": next(batches(1)), "data": torch.linspace(-1, 1, 12 * 13).view(12, 13), "global_batch": 4},
    }
    if name == "plain":
        return names
    ddp = DDP(names["model"])
    opt = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True)
    names |= {"ddp": ddp, "opt": opt}
    if name == "wrapped":
        return names
    schedules = {"attached": "interleaved", "on_step": "on_step"}
    assert name in schedules, f"no prelude {name!r}; there are plain, wrapped, {', '.join(schedules)}"
    names["handle"] = zerolap.attach(ddp, opt, schedule=schedules[name])  # type: ignore[arg-type]
    if name == "on_step":
        names["loss"] = ddp(names["batch"]).square().mean()
    return names


def _run_python(page: str, blocks: list[Block], folder: str) -> list[str]:
    """On one rank: run all blocks of a page. Returns the modules that some of them need and that are not here."""
    names, missing = prelude("plain", folder), []
    before = [p.detach().clone() for p in names["model"].parameters()]
    for block in blocks:
        name, _, module = block.note.partition("needs ")
        if module and importlib.util.find_spec(module) is None:
            missing.append(module)
            continue
        if name.strip():
            names = prelude(name.strip(), folder)
        exec(compile(block.text, block.place, "exec"), names)
    match page:
        case "README.md":
            assert not any(torch.equal(p, old) for p, old in zip(names["model"].parameters(), before, strict=True))
        case "docs/attach.md":
            assert names["handle"].stats().num_updates == 2
        case "docs/checkpoints.md":
            assert names["loaded"].step == 4
        case "docs/elastic.md":
            assert (names["step"], names["consumed"]) == (3, 12)
    return missing


PROGRAMS = {
    b.page: [c for c in BLOCKS if c.page == b.page and c.language == "python" and not c.shown_files] for b in BLOCKS
}


@pytest.mark.parametrize("page", [page for page, blocks in PROGRAMS.items() if blocks])
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    missing, _ = run_ranks(2, _run_python, page, PROGRAMS[page], str(tmp_path))
    if missing:
        pytest.skip(f"some of it needs {', '.join(missing)}")


def test_what_pages_show_of_files_is_there_and_run_somewhere() -> None:
    python = (path for pattern in ("tests/**/*.py", "adapters/*/tests/*.py", "ci/*.py") for path in ROOT.glob(pattern))
    runners = [*python, ROOT / "tox.ini", *ROOT.glob("core/src/zerolap/cli/commands/*.py")]
    texts = {path: path.read_text() for path in runners}
    for block in BLOCKS:
        for file in block.shown_files:
            assert (ROOT / file).exists(), f"{block.place}: {file}"
            words = (
                Path(file).name,
                Path(file).stem,
                file.removeprefix("core/src/").removesuffix(".py").replace("/", "."),
            )
            ran = [
                path.name for path, text in texts.items() if path != Path(__file__) and any(w in text for w in words)
            ]
            assert ran, f"{block.place}: nothing runs {file}"


# --- data -----------------------------------------------------------------------------------------------------------------


def test_data_in_the_docs_can_be_read() -> None:
    for block in BLOCKS:
        if block.language in ("toml", "json"):
            (tomllib.loads if block.language == "toml" else json.loads)(block.text)


# --- commands ---------------------------------------------------------------------------------------------------------------


def commands_of(block: Block) -> list[list[str]]:
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def _shell(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    # In a shell that stays: completion asks which one it was called from.
    script = f"{shlex.join(words)}; exit $?"
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@cache
def _help(*program: str) -> str:
    done = subprocess.run([sys.executable, *program, "--help"], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _check_options(words: list[str], *program: str) -> None:
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        assert re.search(rf"{option}\b", _help(*program)), f"{' '.join(program)} has no option {option}"


def _check_package(what: str) -> None:
    """A folder with a package, as a reader of README or VENDORS.md has it, or the name of one; and its extra, if any."""
    name, _, extra = what.rstrip("]").partition("[")
    if name.startswith("."):
        is_acme = name == "./zerolap-acme"
        folder = ROOT / ("tests/support/acme" if is_acme else re.sub(r"^\./(zerolap/)?", "", name))
    else:
        folder = ROOT / ("core" if name == "zerolap" else f"adapters/{name.removeprefix('zerolap-').replace('-', '_')}")
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert not extra or extra in project["optional-dependencies"], f"{what}: no such extra"


def _check(words: list[str], folder: Path) -> None:
    """Run a command, if that takes seconds; else see whether it could be run: its name and options are real."""
    program, *rest = words
    match words:
        case ["export", assignment]:
            assert "=" in assignment
        case ["git", "clone", *_] | ["cd", _] | ["python3", "-m", "venv", ".venv"] | [".", ".venv/bin/activate"]:
            pass
        case ["pip", "install", package] if "==" in package:
            assert package in (ROOT / "ci/constraints.txt").read_text().split(), f"{package} is not what is tested"
        case ["pip", "install", *packages]:
            for package in packages:
                _check_package(package)
        case ["zerolap", "bench", *options] if "--help" not in options:
            _check_options(options, "benchmarks/compare.py")
        case ["zerolap", *_]:
            takes_long = rest[0] in ("conformance", "demo") or "--try" in rest  # and is run by other tests
            # Click looks at every option before it gives help, and ends with 2 if it does not know one.
            done = _shell([*words, "--help"] if takes_long else words, folder)
            assert done.returncode == 0, f"{shlex.join(words)}: {done.stdout}{done.stderr}"
        case ["torchrun", *options]:
            given = get_args_parser().parse_args(options)
            assert (ROOT / given.training_script).exists()
            if given.training_script_args:
                _check_options(given.training_script_args, given.training_script)
        case ["ci/run_tox", "-e", env, *_]:
            assert f"[testenv:{env}]" in (ROOT / "tox.ini").read_text(), f"tox has no {env}"
        case _:
            assert program.startswith("ci/"), f"how is {program!r} checked? Say so here, or mark the block as text"
            assert os.access(ROOT / program, os.X_OK), f"{program} is not there, or cannot be run"


def _save_some(folder: str) -> None:
    names = prelude("wrapped", folder)
    zerolap.attach(names["ddp"], names["opt"])
    names["loss_of"](names["ddp"](names["batch"])).backward()
    zerolap.checkpoint.save(folder, names["ddp"], names["opt"], step=1)


def test_commands_in_the_docs_are_real(tmp_path: Path) -> None:
    run_ranks(2, _save_some, str(tmp_path / "runs/a"))
    for trace in run_of(2, 4, 2):
        write(trace, tmp_path / "run1")
    done: list[list[str]] = []
    for block in BLOCKS:
        for words in commands_of(block) if block.language == "sh" and not block.shown_files else ():
            if words not in done:
                done.append(words)
                try:
                    _check(words, tmp_path)
                except (AssertionError, OSError, SystemExit) as error:
                    raise AssertionError(f"{block.place}: {shlex.join(words)}: {error}") from error
    assert len(done) > 10


@pytest.mark.parametrize(
    "command",
    [
        "zerolap doctor --no-such-option",
        "zerolap conformance --adaptor acme",
        "zerolap bench --no-such-option 1",
        "torchrun --no-such-option examples/elastic.py",
        "torchrun examples/elastic.py --no-such-option",
        "torchrun examples/nothing.py",
        "pip install './core[nothing]'",
        "pip install ./nothing",
        "pip install torch==2.0.0",
        "ci/run_tox -e nothing",
        "ci/nothing",
        "make all",
    ],
)
def test_a_command_that_is_not_real_is_noticed(command: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, OSError, SystemExit)):
        _check(shlex.split(command), tmp_path)


def test_the_quick_start_trains(tmp_path: Path) -> None:
    words = ["torchrun", "--standalone", "--nproc-per-node", "2", str(ROOT / "examples/quickstart.py")]
    done = _shell(words, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("50 updates, loss "), done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text) + re.findall(
        r"^\[[^]]+\]: ([^#\s]+)", text, re.MULTILINE
    ):
        assert ((ROOT / page).parent / link).exists(), f"{page}: {link}"
