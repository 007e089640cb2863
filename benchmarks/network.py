"""Where ranks run: on loopback, or as two hosts made of network namespaces, joined by a wire of a given rate and delay."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Network:
    """How a rank's command is started, and the interface that counts its bytes."""

    name: str
    prefixes: list[list[str]]  # one per rank
    interfaces: list[str]
    address: str
    bytes_per_second: float | None  # in each direction; None: not limited

    def command(self, rank: int, script: Path, *arguments: str) -> list[str]:
        return [*self.prefixes[rank], sys.executable, str(script), *arguments]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=20, capture_output=True)


def wire_bytes(interface: str) -> int:
    """What this rank's end of the wire has sent, every packet's headers included; what its rate limit counts. 0 on loopback."""
    if interface == "lo":
        return 0
    told = subprocess.run(
        ["tc", "-s", "-j", "qdisc", "show", "dev", interface], check=True, timeout=20, capture_output=True
    ).stdout
    return next(int(each["bytes"]) for each in json.loads(told) if each["kind"] == "tbf")


@contextmanager
def open_network(name: str, num_ranks: int) -> Iterator[Network]:
    """``loopback``, or two hosts: ``1000`` for a wire of 1000 Mbit/s, ``100+5ms`` for 100 Mbit/s with a delay of 5 ms each way."""
    if name == "loopback":
        yield Network(name, [[] for _ in range(num_ranks)], ["lo"] * num_ranks, "127.0.0.1", None)
        return
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        sys.exit(
            f"the network {name!r} is made of network namespaces: that needs root and the ip and tc commands (iproute2)"
        )
    if num_ranks != 2:
        sys.exit("two hosts are one rank each: use --ranks 2, or the loopback network")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is made here is taken down then, too
    rate, _, delay = name.partition("+")
    tag = f"zb{os.getpid() % 100_000}"  # names of our own, so that nobody else's namespaces are touched
    hosts = [(f"{tag}{side}", f"{tag}v{side}", f"10.231.11.{i}") for i, side in enumerate("ab", 1)]
    try:
        for namespace, _, _ in hosts:
            _ip("netns", "add", namespace)
        _ip("link", "add", hosts[0][1], "type", "veth", "peer", "name", hosts[1][1])
        for namespace, interface, address in hosts:
            _ip("link", "set", interface, "netns", namespace)
            _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", interface)
            _ip("-n", namespace, "link", "set", interface, "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
            shape = ["tc", "-n", namespace, "qdisc", "add", "dev", interface]
            limit = ["tbf", "rate", f"{rate}mbit", "burst", "512k", "latency", "100ms"]
            if delay:
                wait = ["netem", "delay", delay, "limit", "100000"]
                subprocess.run([*shape, "root", "handle", "1:", *wait], check=True, timeout=20)
                subprocess.run([*shape, "parent", "1:1", "handle", "10:", *limit], check=True, timeout=20)
            else:
                subprocess.run([*shape, "root", *limit], check=True, timeout=20)
        yield Network(
            f"{rate} Mbit/s{f', {delay} delay' if delay else ''}",
            [["ip", "netns", "exec", namespace] for namespace, _, _ in hosts],
            [interface for _, interface, _ in hosts],
            hosts[0][2],
            float(rate) * 1e6 / 8,
        )
    finally:
        for namespace, _, _ in hosts:  # takes its end of the wire with it
            subprocess.run(["ip", "netns", "del", namespace], check=False, timeout=20, capture_output=True)
