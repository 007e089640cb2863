"""Where ranks run: on loopback, or on hosts made of network namespaces and joined by a switch, with wires of a given rate and delay."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True, slots=True)
class Network:
    """How a rank's command is started, and the interface that counts its bytes."""

    name: str
    prefixes: list[list[str]]  # one per rank
    interfaces: list[str]
    address: str
    bytes_per_second: float | None  # of a host, in each direction; None: not limited

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
                own["RANKS_PER_HOST"] = str(self.interfaces.count(interface))
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
    """What this rank's host has sent, every packet's headers included; what its rate limit counts. 0 on loopback."""
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


def _hand_on(ends: dict[bytes, int], seconds: float) -> None:
    """From now on every packet that comes out of a tunnel goes into its receiver's this much later; tunnels by address."""

    def receive(source: int, under_way: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        while True:
            packet = os.read(source, 65536)
            under_way.put((time.perf_counter() + seconds, packet))

    def deliver(under_way: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        while True:
            due, packet = under_way.get()
            time.sleep(max(0.0, due - time.perf_counter()))
            target = ends.get(packet[16:20])
            if target is not None:  # it is for one host
                os.write(target, packet)

    def until_closed(forever: Callable[[], None]) -> None:
        with suppress(OSError):  # the namespaces are gone, and the tunnels with them
            forever()

    for source in ends.values():
        under_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        for forever in (partial(receive, source, under_way), partial(deliver, under_way)):
            threading.Thread(target=until_closed, args=(forever,), daemon=True).start()


@dataclass(frozen=True, slots=True)
class _Host:
    namespace: str
    interface: str
    address: str
    port: str  # its wire's other end, at the switch


def _split(name: str, num_ranks: int) -> tuple[int, str, str]:
    """The number of hosts, their wires' rate and the delay."""
    hosts, times, wire = name.rpartition("x")
    rate, _, delay = wire.partition("+")
    num_hosts = int(hosts) if times else num_ranks
    if num_hosts < 2 or num_ranks % num_hosts:
        sys.exit(f"{num_ranks} ranks cannot be spread evenly over {num_hosts} hosts; a network has two hosts at least")
    return num_hosts, rate, delay


def _limit(namespace: str, interface: str, rate: str, *, delay: str = "") -> None:
    shape = ["tc", "-n", namespace, "qdisc", "add", "dev", interface]
    limit = ["tbf", "rate", f"{rate}mbit", "burst", str(_burst(float(rate))), "latency", "100ms"]
    if delay:
        wait = ["netem", "delay", delay, "limit", "100000"]
        subprocess.run([*shape, "root", "handle", "1:", *wait], check=True, timeout=20)
        subprocess.run([*shape, "parent", "1:1", "handle", "10:", *limit], check=True, timeout=20)
    else:
        subprocess.run([*shape, "root", *limit], check=True, timeout=20)


def _connect(hosts: list[_Host], switch: str, rate: str, delay: str) -> None:
    """Each host by a wire of its own to a switch, which is as fast as can be; a wire's limit is the same in both directions."""
    is_relayed = bool(delay) and not _has_netem(hosts[0].namespace)
    ends = {}
    _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    _ip("-n", switch, "link", "set", "bridge", "up")
    for host in hosts:
        namespace, interface = host.namespace, host.interface
        # The same on every machine, and every connection the same: BBR takes a burst for the wire's rate, and then errs.
        _ip("netns", "exec", namespace, "sysctl", "-q", "-w", "net.ipv4.tcp_congestion_control=reno")
        if is_relayed:
            ends[socket.inet_aton(host.address)] = _open_tunnel(interface)
            _ip("link", "set", interface, "netns", namespace)
        else:
            pair = ["link", "add", interface, "netns", namespace, "type", "veth", "peer", "name", host.port]
            _ip(*pair, "netns", switch)
            _ip("-n", switch, "link", "set", host.port, "master", "bridge", "up")
            _limit(switch, host.port, rate)
        _ip("-n", namespace, "addr", "add", f"{host.address}/24", "dev", interface)
        _ip("-n", namespace, "link", "set", interface, "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        _limit(namespace, interface, rate, delay="" if is_relayed else delay)
    if is_relayed:  # now that all are up: nothing can be read before
        _hand_on(ends, float(delay.removesuffix("ms")) / 1000)


@contextmanager
def open_network(name: str, num_ranks: int) -> Iterator[Network]:
    """``loopback``, or hosts of one rank each: ``1000`` for wires of 1000 Mbit/s, ``100+5ms`` for 100 Mbit/s with a delay of 5 ms each
    way. ``2x100`` is two hosts, among which the ranks are divided.

    Where the kernel cannot delay packets (it has no netem) this process does, which takes some of its cores' time.
    """
    if name == "loopback":
        yield Network(name, [[] for _ in range(num_ranks)], ["lo"] * num_ranks, "127.0.0.1", None)
        return
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        sys.exit(
            f"the network {name!r} is made of network namespaces: that needs root and the ip and tc commands (iproute2)"
        )
    num_hosts, rate, delay = _split(name, num_ranks)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is made here is taken down then, too
    tag = f"zb{os.getpid() % 100_000}"  # names of our own, so that nobody else's namespaces are touched
    switch = f"{tag}s"
    hosts = [_Host(f"{tag}h{i}", f"{tag}v{i}", f"10.231.11.{i + 1}", f"{tag}p{i}") for i in range(num_hosts)]
    try:
        for namespace in (switch, *(host.namespace for host in hosts)):
            _ip("netns", "add", namespace)
        _connect(hosts, switch, rate, delay)
        host_of = [host for host in hosts for _ in range(num_ranks // num_hosts)]
        yield Network(
            f"{rate} Mbit/s{f', {delay} delay' if delay else ''}",
            [["ip", "netns", "exec", host.namespace] for host in host_of],
            [host.interface for host in host_of],
            hosts[0].address,
            float(rate) * 1e6 / 8,
        )
    finally:
        for namespace in (*(host.namespace for host in hosts), switch):  # takes its ends of wires with it
            subprocess.run(["ip", "netns", "del", namespace], check=False, timeout=20, capture_output=True)
