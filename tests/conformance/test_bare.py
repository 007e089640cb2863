"""The bare backend: what is found to be lacking is what is lacking."""

from __future__ import annotations

import os
import subprocess
import sys

from zerolap_conformance.bare import NEEDS


def test_a_backend_is_tried_alone_and_what_it_lacks_is_named() -> None:
    command = [sys.executable, "-m", "zerolap", "conformance", "backend", "--device-type", "cpu", "--backend", "gloo"]
    run = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=300)
    works = [line.split("  ")[1] for line in run.stdout.splitlines() if line.startswith("works")]
    assert works == [need.what for need in NEEDS if need.what != "coalescing"], run.stdout + run.stderr
    assert "Backend gloo does not implement startCoalescing" in run.stdout
    assert run.returncode == 1
