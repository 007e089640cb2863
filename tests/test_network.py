"""The networks that benchmarks run on: hosts that reach each other at the rate asked for, and are gone afterwards."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support import ROOT

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"),
    reason="needs root and the ip and tc commands to make network namespaces",
)
NUM_BYTES = 500_000

# Every rank sends so many bytes to rank 0, one rank after the other.
WORKER = f"""
import json, os, pathlib, socket, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
start = time.monotonic()
if rank == 0:
    with socket.create_server(address) as server:
        server.settimeout(20)
        for _ in range(size - 1):
            connection, _ = server.accept()
            while connection.recv(65536):
                pass
            connection.close()
else:
    while True:
        try:
            connection = socket.create_connection(address, timeout=20)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    connection.sendall(bytes({NUM_BYTES}))
    connection.close()
said = {{"seconds": time.monotonic() - start, "on_host": int(os.environ["RANKS_PER_HOST"])}}
pathlib.Path(sys.argv[1], str(rank)).write_text(json.dumps(said))
"""

# Opens a network, runs the worker there, and waits to be ended if told to.
OPENER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from network import open_network
with open_network(sys.argv[2], int(sys.argv[3])) as network:
    network.run(sys.argv[4], [sys.argv[5]], seconds=60)
    print("open", flush=True)
    time.sleep(60 if "stay" in sys.argv else 0)
"""


def _namespaces(of: int) -> list[str]:
    names = subprocess.run(["ip", "netns", "list"], check=True, timeout=20, capture_output=True, text=True).stdout
    return [line for line in names.splitlines() if line.startswith(f"zb{of % 100_000}")]


@pytest.fixture(name="worker")
def _worker(tmp_path: Path) -> list[str]:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    said = tmp_path / "said"
    said.mkdir()
    return [str(script), str(said)]


@pytest.mark.parametrize(("name", "num_ranks", "on_host"), [("100", 3, 1), ("2x100", 4, 2), ("100+5ms", 3, 1)])
def test_ranks_on_hosts_reach_each_other(name: str, num_ranks: int, on_host: int, worker: list[str]) -> None:
    command = [sys.executable, "-c", OPENER, str(ROOT / "benchmarks"), name, str(num_ranks), *worker]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, errors = process.communicate(timeout=90)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    said = [json.loads((Path(worker[1]) / str(rank)).read_text()) for rank in range(num_ranks)]
    assert [each["on_host"] for each in said] == [on_host] * num_ranks
    # Those of other hosts came by one wire; the burst that a limit allows passes at once.
    least = ((num_ranks - on_host) * NUM_BYTES - 2 * 131072) / 12.5e6
    assert said[0]["seconds"] >= least, said
    assert _namespaces(process.pid) == []


def test_a_network_goes_with_the_process_that_is_ended(worker: list[str]) -> None:
    command = [sys.executable, "-c", OPENER, str(ROOT / "benchmarks"), "100", "3", *worker, "stay"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            assert len(_namespaces(process.pid)) == 4, "three hosts and a switch"
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)
        finally:
            process.kill()
    deadline = time.monotonic() + 20
    while _namespaces(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _namespaces(process.pid) == []


def test_ranks_that_cannot_be_divided_among_hosts_are_refused() -> None:
    command = [sys.executable, "-c", OPENER, str(ROOT / "benchmarks"), "2x100", "3", "no", "no"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "3 ranks cannot be spread evenly over 2 hosts" in done.stderr
