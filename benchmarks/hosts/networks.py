"""Several hosts on one machine: network namespaces of Linux, joined by links of a chosen rate.

A namespace has interfaces, addresses and connections of its own, so that its processes reach those of another one only
over the link between them. Two hosts are joined by a pair of virtual Ethernet devices. Three or more have such a pair
each to a switch, a bridge in a further namespace, and so share nothing but the switch. A token bucket at the sending
end gives each host the rate; both directions are independent, as on a real card.

All hosts share the machine's cores: a rate that takes a core of its own is more than two busy processes reach.

Names begin with `PREFIX` and the process that made them. A child process removes them, with all processes in them, when
that process has closed the network or has ended, in whatever way.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

__all__ = ["PREFIX", "Host", "Network", "NotAllowed", "joined_hosts", "refusal"]

PREFIX = "penstock"
_PACKET_BYTES = 9000
"""The largest packet: what fast networks use. Smaller ones would take a core for the cutting of messages."""
_BUCKET_SECONDS, _LEAST_BUCKET_BYTES = 1e-4, 10_000
"""A link that was idle may pass at once what it passes in these seconds, and at least these bytes, a packet."""
_QUEUE_SECONDS = 0.05
"""How long a packet may wait for its turn before it is dropped: the memory of a usual switch."""
_CONTROL = "reno"
"""The congestion control of the connections: the one that every namespace may choose. No link here loses packets before
its queue is full.
"""


class NotAllowed(RuntimeError):
    """This process may not make network namespaces, or the machine lacks the tools. The message says which."""


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace with one interface."""

    name: str
    interface: str
    address: str

    def command(self, command: Sequence[str]) -> list[str]:
        """`command`, to be run on this host."""
        return ["ip", "netns", "exec", self.name, *command]

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that a process on this host needs to find the others by the link."""
        return {"GLOO_SOCKET_IFNAME": self.interface, "TP_SOCKET_IFNAME": self.interface}


@dataclass(slots=True)
class Network:
    """The hosts, and what can be done to their links."""

    hosts: tuple[Host, ...]

    def set_rate(self, bits_per_second: float) -> None:
        """Gives every host this rate for what it sends."""
        bucket = max(_LEAST_BUCKET_BYTES, round(bits_per_second / 8 * _BUCKET_SECONDS))
        limit = max(2 * bucket, round(bits_per_second / 8 * _QUEUE_SECONDS))
        for one in self.hosts:
            rate = ["rate", f"{round(bits_per_second)}bit", "burst", f"{bucket}b", "limit", f"{limit}b"]
            _run("tc", "-n", one.name, "qdisc", "replace", "dev", one.interface, "root", "tbf", *rate)

    def cut(self, host: Host) -> None:
        """Takes down the link of `host`, as if its cable were pulled: no end gets a message."""
        _run("ip", "-n", host.name, "link", "set", host.interface, "down")


@cache
def refusal() -> str:
    """Why this process cannot make hosts, and what to do; empty if it can."""
    try:
        with joined_hosts(2, 1e9):
            return ""
    except NotAllowed as error:
        return str(error)


@contextmanager
def joined_hosts(count: int, bits_per_second: float) -> Iterator[Network]:
    """`count` hosts, two or more, joined by links of this rate. Raises `NotAllowed`."""
    if sys.platform != "linux" or count < 2:
        raise NotAllowed(f"expected two hosts or more on Linux, found {count} on {sys.platform}: use a Linux machine")
    own = f"{PREFIX}-{os.getpid()}-{os.urandom(2).hex()}"
    names = [f"{own}-{number}" for number in range(count)]
    switch = [f"{own}-switch"] if count > 2 else []
    hosts = tuple(Host(name, "link0", f"10.231.0.{number + 1}") for number, name in enumerate(names))
    with _removed([*names, *switch]):
        for name in [*names, *switch]:
            _run("ip", "netns", "add", name)
        if switch:
            _run("ip", "-n", switch[0], "link", "add", "switch", "type", "bridge")
            _run("ip", "-n", switch[0], "link", "set", "switch", "up")
            for number, host in enumerate(hosts):
                port = f"port{number}"
                _pair(host.name, host.interface, switch[0], port)
                _run("ip", "-n", switch[0], "link", "set", port, "master", "switch", "up")
        else:
            _pair(hosts[0].name, hosts[0].interface, hosts[1].name, hosts[1].interface)
        for host in hosts:
            _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                _run("ip", "-n", host.name, "link", "set", interface, "up")
            _run(*host.command(["sysctl", "-q", "-w", f"net.ipv4.tcp_congestion_control={_CONTROL}"]))
        network = Network(hosts)
        network.set_rate(bits_per_second)
        yield network


def _pair(here: str, interface: str, there: str, other: str) -> None:
    link = f"ip link add {interface} mtu {_PACKET_BYTES} netns {here} type veth"
    _run(*f"{link} peer name {other} mtu {_PACKET_BYTES} netns {there}".split())


@contextmanager
def _removed(names: Sequence[str]) -> Iterator[None]:
    """Ends what runs in the namespaces `names` and removes them afterwards, also if this process is killed: its child
    reads until then.
    """
    commands = "; ".join(f"kill -9 $(ip netns pids {name}); ip netns delete {name}" for name in names)
    waiting = ["sh", "-c", f"read -r end; {commands}"]
    try:
        keeper = subprocess.Popen(
            waiting, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        raise NotAllowed(f"a shell is needed to remove network namespaces, and cannot be started: {error}") from error
    try:
        yield
    finally:
        assert keeper.stdin is not None
        keeper.stdin.close()
        keeper.wait()


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise NotAllowed(
            f"the command {command[0]!r} is missing, which makes network namespaces: install it, for example with "
            "`apt-get install iproute2 procps`"
        ) from error
    if done.returncode:
        raise NotAllowed(
            f"`{' '.join(command)}` failed: {done.stderr.strip()}. Network namespaces need root (CAP_SYS_ADMIN and "
            "CAP_NET_ADMIN) and the kernel's veth, bridge and sch_tbf: run as root, in a container with these rights"
        )
