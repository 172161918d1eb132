"""Processes of one host meet, and hand each other open files.

Each listens at a socket without a place in the file system (Linux's abstract names), which nothing need clean up; who
can connect to it shares the host and its network. Files are handed over such a connection, and with them whatever two
processes share: memory, and the ends of a pair of connected sockets.
"""

import os
import socket
import struct
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

__all__ = ["LocalPeers", "connect_local_peers"]

SECONDS = 20.0
"""How long a process of this host may take to answer; it is in the same call."""
_GREETING = struct.Struct("=16sq")

Gather: TypeAlias = Callable[[Any], Sequence[Any]]


class LocalPeers:
    """The processes of this host that were met: a connection to each, by rank.

    `processes`: how many there are on this host, met or not, this one included.
    """

    def __init__(self, connections: dict[int, socket.socket], processes: int) -> None:
        self._connections = connections
        self.processes = processes

    def __contains__(self, rank: int) -> bool:
        return rank in self._connections

    def give(self, rank: int, descriptors: Sequence[int]) -> None:
        """Hands open files to `rank`."""
        socket.send_fds(self._connections[rank], [b"."], descriptors)

    def take(self, rank: int, count: int) -> list[int]:
        """The `count` files that `rank` hands over. `OSError` if it has ended."""
        said, descriptors, _, _ = socket.recv_fds(self._connections[rank], 1, count)
        if len(descriptors) != count:
            raise ConnectionError(f"rank {rank} {'hung up' if not said else 'handed over too little'}")
        return descriptors

    def part(self) -> None:
        """Closes the connections; what was handed over stays."""
        for connection in self._connections.values():
            connection.close()


def connect_local_peers(peers: Iterable[int], rank: int, gather: Gather, willing: bool) -> LocalPeers:
    """Meets those of `peers` that are on the host of this process, which is `rank`, and `willing` as well.

    Collective; `gather` gives every process what each of them says, by rank. Whoever cannot be met is left out, on both
    sides.
    """
    token, listener = uuid.uuid4().bytes, None
    if willing:
        with suppress(OSError):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(b"\0penstock-" + token)
            listener.listen(1024)
    cards = gather((_host(), token) if listener is not None else None)
    mine = cards[rank]
    here = [peer for peer, card in enumerate(cards) if mine is not None and card is not None and card[0] == mine[0]]
    near = sorted(set(peers) & set(here))
    met: dict[int, socket.socket] = {}
    with suppress(OSError):
        if listener is not None:
            _connect(met, [peer for peer in near if peer < rank], rank, cards)
            _accept(met, [peer for peer in near if peer > rank], listener, token)
    if listener is not None:
        listener.close()
    agreed = gather(tuple(met))
    for stranger in [peer for peer in met if rank not in agreed[peer]]:
        met.pop(stranger).close()
    return LocalPeers(met, len(here))


def _connect(
    met: dict[int, socket.socket], peers: Sequence[int], rank: int, cards: Sequence[tuple[str, bytes]]
) -> None:
    for peer in peers:
        token = cards[peer][1]
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(SECONDS)
        connection.connect(b"\0penstock-" + token)
        connection.sendall(_GREETING.pack(token, rank))
        met[peer] = connection


def _accept(met: dict[int, socket.socket], peers: Sequence[int], listener: socket.socket, token: bytes) -> None:
    listener.settimeout(SECONDS)
    awaited = set(peers)
    while awaited:
        connection, _ = listener.accept()
        connection.settimeout(SECONDS)
        greeting = connection.recv(_GREETING.size, socket.MSG_WAITALL)
        said, peer = _GREETING.unpack(greeting) if len(greeting) == _GREETING.size else (b"", -1)
        # Anybody on the host may knock; who was told the token is of this run.
        if said == token and peer in awaited:
            awaited.remove(peer)
            met[peer] = connection
        else:
            connection.close()


def _host() -> str:
    """What tells this host apart, and the network of its container, on which the sockets live."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
