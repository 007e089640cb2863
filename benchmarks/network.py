"""Where ranks run: on loopback, or as two hosts made of network namespaces, joined by a wire of a given rate and delay."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Network:
    """How a rank's command is started, and the interface that counts its bytes."""

    name: str
    prefixes: list[list[str]]  # one per rank
    interfaces: list[str]
    address: str
    bytes_per_second: float | None  # in each direction; None: not limited

    def run(self, script: str, arguments: list[str], *, seconds: float, **environment: str) -> None:
        """Run a script as every rank, each told who it is as torchrun would, and end with an error if one does."""
        shared = {
            **os.environ,
            "WORLD_SIZE": str(len(self.prefixes)),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(20_000 + os.getpid() % 20_000),
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        ranks = []
        try:
            for rank, (prefix, interface) in enumerate(zip(self.prefixes, self.interfaces, strict=True)):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": interface}
                ranks.append(subprocess.Popen([*prefix, sys.executable, script, *arguments], env=shared | own))
            codes = [rank.wait(timeout=seconds) for rank in ranks]
        finally:
            for process in ranks:
                process.kill()
        if any(codes):
            sys.exit(f"ranks ended with {codes}")


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


def _burst(megabits: float) -> int:
    """The bytes that may pass at once after a pause: 4 ms of the rate, but at least two of the largest packets, or the limit cuts them up."""
    return max(131072, int(megabits * 1e6 / 8 * 0.004))


def _has_netem(namespace: str) -> bool:
    """Whether this kernel can delay packets by itself; tried where nobody is disturbed."""
    tried = ["tc", "-n", namespace, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    if subprocess.run(tried, check=False, timeout=20, capture_output=True).returncode:
        return False
    subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", "lo", "root"], check=True, timeout=20)
    return True


def _open_tunnel(interface: str) -> int:
    """A network interface whose packets come here, and can be moved to any namespace. Large packets, for few of them."""
    end = os.open("/dev/net/tun", os.O_RDWR)
    set_interface, tun, no_header = 0x400454CA, 0x0001, 0x1000
    fcntl.ioctl(end, set_interface, struct.pack("16sH", interface.encode(), tun | no_header))
    _ip("link", "set", interface, "mtu", "60000")
    return end


def _hand_on(source: int, target: int, seconds: float) -> None:
    """From now on every packet that comes out of one tunnel goes into the other this much later."""
    under_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def receive() -> None:
        while True:
            packet = os.read(source, 65536)
            under_way.put((time.perf_counter() + seconds, packet))

    def deliver() -> None:
        while True:
            due, packet = under_way.get()
            time.sleep(max(0.0, due - time.perf_counter()))
            os.write(target, packet)

    def until_closed(forever: Callable[[], None]) -> None:
        with suppress(OSError):  # the namespaces are gone, and the tunnels with them
            forever()

    for forever in (receive, deliver):
        threading.Thread(target=until_closed, args=(forever,), daemon=True).start()


@contextmanager
def open_network(name: str, num_ranks: int) -> Iterator[Network]:
    """``loopback``, or two hosts: ``1000`` for a wire of 1000 Mbit/s, ``100+5ms`` for 100 Mbit/s with a delay of 5 ms each way.

    Where the kernel cannot delay packets (it has no netem) this process does, which takes some of its cores' time.
    """
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
            # The same on every machine, and every connection the same: BBR takes a burst for the wire's rate, and then errs.
            _ip("netns", "exec", namespace, "sysctl", "-q", "-w", "net.ipv4.tcp_congestion_control=reno")
        is_relayed = bool(delay) and not _has_netem(hosts[0][0])
        if is_relayed:
            ends = [_open_tunnel(interface) for _, interface, _ in hosts]
        else:
            _ip("link", "add", hosts[0][1], "type", "veth", "peer", "name", hosts[1][1])
        for namespace, interface, address in hosts:
            _ip("link", "set", interface, "netns", namespace)
            _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", interface)
            _ip("-n", namespace, "link", "set", interface, "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
            shape = ["tc", "-n", namespace, "qdisc", "add", "dev", interface]
            limit = ["tbf", "rate", f"{rate}mbit", "burst", str(_burst(float(rate))), "latency", "100ms"]
            if delay and not is_relayed:
                wait = ["netem", "delay", delay, "limit", "100000"]
                subprocess.run([*shape, "root", "handle", "1:", *wait], check=True, timeout=20)
                subprocess.run([*shape, "parent", "1:1", "handle", "10:", *limit], check=True, timeout=20)
            else:
                subprocess.run([*shape, "root", *limit], check=True, timeout=20)
        if is_relayed:  # now that both are up: nothing can be read before
            for source, target in (ends, ends[::-1]):
                _hand_on(source, target, float(delay.removesuffix("ms")) / 1000)
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
