"""Connects the processes of one host, so that they can pass each other open files.

Each listens on a Unix socket without a path (Linux's abstract names), which needs no cleaning up. A process that can
connect to it shares the host and its network. Open files are sent over such a connection, and with them everything that
two processes share: memory, and the ends of a pair of connected sockets.
"""

import os
import socket
import struct
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

__all__ = ["LocalPeers", "connect_local_peers"]

_SECONDS = 20.0
"""How long a process of this host may take to answer; it makes the same call."""
_HELLO = struct.Struct("=16sq")

Gather: TypeAlias = Callable[[Any], Sequence[Any]]


class LocalPeers:
    """Connections to other processes of this host, by rank.

    `processes`: the number of processes on this host, connected or not, including this one.
    """

    def __init__(self, connections: dict[int, socket.socket], processes: int) -> None:
        self._connections = connections
        self.processes = processes

    def __contains__(self, rank: int) -> bool:
        return rank in self._connections

    def send_fds(self, rank: int, descriptors: Sequence[int]) -> None:
        """Sends open files to `rank`."""
        socket.send_fds(self._connections[rank], [b"."], descriptors)

    def recv_fds(self, rank: int, count: int) -> list[int]:
        """Receives `count` open files from `rank`. `OSError` if it has ended."""
        data, descriptors, _, _ = socket.recv_fds(self._connections[rank], 1, count)
        if len(descriptors) != count:
            raise ConnectionError(
                f"rank {rank} {'closed the connection' if not data else 'sent fewer files than expected'}"
            )
        return descriptors

    def close(self) -> None:
        """Closes the connections. Files that were received stay open."""
        for connection in self._connections.values():
            connection.close()


def connect_local_peers(peers: Iterable[int], rank: int, gather: Gather, enabled: bool) -> LocalPeers:
    """Connects this process, `rank`, with those of `peers` that are on the same host, if both have it `enabled`.

    Collective; `gather` returns what each process passes to it, by rank. A connection that fails is dropped on both
    sides.
    """
    token, listener = uuid.uuid4().bytes, None
    if enabled:
        with suppress(OSError):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(b"\0penstock-" + token)
            listener.listen(1024)
    addresses = gather((_host(), token) if listener is not None else None)
    mine = addresses[rank]
    here = [
        peer
        for peer, address in enumerate(addresses)
        if mine is not None and address is not None and address[0] == mine[0]
    ]
    local = sorted(set(peers) & set(here))
    connections: dict[int, socket.socket] = {}
    with suppress(OSError):
        if listener is not None:
            _connect(connections, [peer for peer in local if peer < rank], rank, addresses)
            _accept(connections, [peer for peer in local if peer > rank], listener, token)
    if listener is not None:
        listener.close()
    agreed = gather(tuple(connections))
    for peer in [peer for peer in connections if rank not in agreed[peer]]:
        connections.pop(peer).close()
    return LocalPeers(connections, len(here))


def _connect(
    connections: dict[int, socket.socket], peers: Sequence[int], rank: int, addresses: Sequence[tuple[str, bytes]]
) -> None:
    for peer in peers:
        token = addresses[peer][1]
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_SECONDS)
        connection.connect(b"\0penstock-" + token)
        connection.sendall(_HELLO.pack(token, rank))
        connections[peer] = connection


def _accept(connections: dict[int, socket.socket], peers: Sequence[int], listener: socket.socket, token: bytes) -> None:
    listener.settimeout(_SECONDS)
    awaited = set(peers)
    while awaited:
        connection, _ = listener.accept()
        connection.settimeout(_SECONDS)
        hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
        sent_token, peer = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", -1)
        # Any process of the host can connect. Only those of this run have the token.
        if sent_token == token and peer in awaited:
            awaited.remove(peer)
            connections[peer] = connection
        else:
            connection.close()


def _host() -> str:
    """Identifies this host and the network namespace of its container, in which the sockets live."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
