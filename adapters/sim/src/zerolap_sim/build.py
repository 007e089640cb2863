"""Compiling the C++ part once and loading it. Nothing here registers anything with torch; loading does."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from zerolap._torch import extension_macros

MODULE = "zerolap_sim._extension"
_SOURCES = Path(__file__).parent / "csrc"
_TORCH = Path(
    torch.__file__
).parent  # torch.utils.cpp_extension, which knows no more, speaks of CUDA when it is imported
_LIBRARY = f"_extension{sysconfig.get_config_var('EXT_SUFFIX')}"


class BuildError(RuntimeError):
    """The simulated device could not be compiled."""


def _compile_flags() -> list[str]:
    includes = [_TORCH / "include", _TORCH / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    return [
        "-std=c++20",
        "-fPIC",
        "-fvisibility=hidden",
        "-O1",  # its time goes into torch's own kernels; -O2 takes half as long again to compile
        "-g0",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        "-DTORCH_EXTENSION_NAME=_extension",
        *extension_macros(),
        *(f"-isystem{path}" for path in includes),
    ]


def _link_flags() -> list[str]:
    return ["-shared", f"-L{_TORCH / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]


def cache_folder() -> Path:
    """Where compiled extensions are kept: ``$ZEROLAP_SIM_CACHE``, or the user's cache folder; without one, a temporary one of ours."""
    if chosen := os.environ.get("ZEROLAP_SIM_CACHE"):
        return Path(chosen)
    with suppress(OSError, RuntimeError):  # a home that cannot be written to, or none
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zerolap-sim"
        cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK) or (cache / cache_key()).exists():
            return cache
    return _own_temporary_folder()


def _own_temporary_folder() -> Path:
    """The same one every time. What is in it is executed: nobody else may have made it, or be able to write to it."""
    folder = Path(tempfile.gettempdir(), f"zerolap-sim-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise BuildError(f"{folder} is not a folder of ours alone; remove it, or set ZEROLAP_SIM_CACHE to another one")
    return folder


def cache_key() -> str:
    """Names one build: another torch, another interpreter, other sources or other flags give another key."""
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update("\0".join(_compile_flags() + _link_flags()).encode())
    return f"torch{torch.__version__}-{sysconfig.get_config_var('SOABI')}-{digest.hexdigest()[:16]}"


def find_compiler() -> str:
    """The C++ compiler: ``$CXX``, or the first of the usual names on the path."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in names:
        if found := shutil.which(name):
            return found
    raise BuildError(
        f"the simulated device has to be compiled once, and no C++ compiler was found (looked for {', '.join(names)}); "
        "install one with C++20, e.g. `apt install g++` or `dnf install gcc-c++`, or point $CXX to it"
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # let go by the kernel, also if the holder is killed
        yield


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"compiling the simulated device failed:\n{' '.join(command)}\n{done.stdout}{done.stderr}")


def _compile(into: Path, compiler: str) -> None:
    sources = sorted(_SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size)  # the slow ones first
    objects = [into / f"{path.stem}.o" for path in sources]
    commands = [
        [compiler, *_compile_flags(), "-c", str(source), "-o", str(target)]
        for source, target in zip(sources, objects, strict=True)
    ]
    jobs = int(os.environ.get("MAX_JOBS") or min(os.cpu_count() or 1, len(sources)))
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(_run, commands))
    _run([compiler, *map(str, objects), *_link_flags(), "-o", str(into / _LIBRARY)])
    for path in objects:
        path.unlink()


def build() -> Path:
    """Compile unless that was done before, and return the library; processes that ask together compile it once."""
    cache, key = cache_folder(), cache_key()
    library = cache / key / _LIBRARY
    if library.exists():
        return library
    compiler = find_compiler()
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f"{key}.lock"):
        if library.exists():
            return library
        for left_over in cache.glob(f"{key}.building-*"):  # of a build that was killed; we hold the lock
            shutil.rmtree(left_over)
        print("zerolap-sim: compiling the simulated device, about a minute, once", file=sys.stderr, flush=True)
        workshop = Path(tempfile.mkdtemp(prefix=f"{key}.building-", dir=cache))
        try:
            _compile(workshop, compiler)
            workshop.rename(cache / key)
        finally:
            shutil.rmtree(workshop, ignore_errors=True)
    return library


def load() -> None:
    """Make ``zerolap_sim._extension`` importable, compiling it if need be."""
    if MODULE in sys.modules:
        return
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(build()))
    spec = importlib.util.spec_from_file_location(MODULE, loader.path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[MODULE] = module
    sys.modules["zerolap_sim"]._extension = module  # type: ignore[attr-defined]  # as the import system does
