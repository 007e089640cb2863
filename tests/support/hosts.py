"""Two hosts, made of network namespaces and joined by a veth pair: a fixture."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

TAG = f"zl{os.getpid() % 100_000}"  # names of our own, so that nobody else's namespaces are touched


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, timeout=20, capture_output=True)


@pytest.fixture(name="hosts")
def two_hosts() -> Iterator[list[tuple[str, str, str]]]:
    """(namespace, interface, address) of two hosts that see nothing but each other."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the ip command to make network namespaces")
    made = [(f"{TAG}{side}", f"{TAG}v{side}", f"10.231.9.{i}") for i, side in enumerate("ab", 1)]
    try:
        for namespace, _, _ in made:
            ip("netns", "add", namespace)
        ip("link", "add", made[0][1], "type", "veth", "peer", "name", made[1][1])
        for namespace, interface, address in made:
            ip("link", "set", interface, "netns", namespace)
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", interface)
            ip("-n", namespace, "link", "set", interface, "mtu", "65000", "up")  # large frames, so that headers are few
            ip("-n", namespace, "link", "set", "lo", "up")
        yield made
    finally:
        for namespace, _, _ in made:  # takes its end of the pair with it
            subprocess.run(["ip", "netns", "del", namespace], check=False, timeout=20, capture_output=True)
