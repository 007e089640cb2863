"""Bytes on a wire, from the interface's own counters: two hosts, made of network namespaces and joined by a veth pair."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from support import ROOT, pace_worker
from support.hosts import ip, two_hosts  # noqa: F401 - a fixture


def _run(hosts: list[tuple[str, str, str]], worker: str, *arguments: str) -> list[dict[str, float]]:
    """A worker on either host; returns what they said."""
    ranks = []
    for rank, (namespace, interface, _) in enumerate(hosts):
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": hosts[0][2],
            "MASTER_PORT": "29400",  # free: the namespace is new
            "GLOO_SOCKET_IFNAME": interface,
        }
        command = ["ip", "netns", "exec", namespace, sys.executable, str(ROOT / "tests/support" / worker), *arguments]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        results = [rank.communicate(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, err) in zip(ranks, results, strict=True):
        assert rank.returncode == 0, err
    return [json.loads(out.splitlines()[-1]) for out, _ in results]


@pytest.mark.parametrize(("schedule", "gather"), [("interleaved", "eager"), ("on_step", "lazy")])
def test_2p_elements_cross_the_wire(hosts: list[tuple[str, str, str]], schedule: str, gather: str) -> None:
    for said in _run(hosts, "net_worker.py", schedule, gather):
        expected = 2 * 4 * said["params"] / 2  # 2P(n-1)/n elements of 4 bytes, on 2 ranks
        assert abs(said["sent"] / expected - 1) < 0.001
        # What the interface counts has headers on top, and acknowledgements of what the other has sent.
        assert 1 <= said["counted"] / expected < 1.01, said


@pytest.mark.skipif(shutil.which("tc") is None, reason="needs the tc command to limit a wire's rate")
def test_reductions_keep_a_slow_wire_busy(hosts: list[tuple[str, str, str]]) -> None:
    """While one message is added the next one comes, on every rank, also on one whose part is larger than half of the bucket."""
    for namespace, interface, _ in hosts:
        limit = ["tbf", "rate", "100mbit", "burst", "128k", "latency", "100ms"]
        subprocess.run(
            ["tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *limit], check=True, timeout=20
        )
        # One that takes a burst for the wire's rate would be measured instead.
        ip("netns", "exec", namespace, "sysctl", "-q", "-w", "net.ipv4.tcp_congestion_control=reno")
    most = 1.2 * pace_worker.BYTES / 12.5e6
    for said in _run(hosts, "pace_worker.py", str(most)):
        assert said["seconds"] <= most, said
