"""Connects the processes of one host, so that they can pass each other open files.

Each listens on a Unix socket without a path (Linux's abstract names), which needs no cleaning up. A process that can
connect to it shares the host and its network. Both ends must be of one user, and prove to each other that they have the
key of the run, over random numbers of both: a proof that was overheard is of no use. Open files are sent over such a
connection, and with them everything that two processes share: memory, and the ends of a pair of connected sockets.
"""

import os
import secrets
import socket
import struct
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from penstock.runtime.transport.run_keys import PROOF_BYTES, RunKey

_STRANGER_SECONDS = 5.0
"""How long a process that has connected may take for its proof. Others wait meanwhile."""
_NONCE_BYTES = 16
_RANK = struct.Struct("<q")
_CREDENTIALS = struct.Struct("=iII")
"""The process, user and group at the other end of a socket, as Linux gives them."""

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


def connect_local_peers(
    peers: Iterable[int], rank: int, gather: Gather, key: RunKey | None, *, seconds: float = 20.0
) -> LocalPeers:
    """Connects this process, `rank`, with those of `peers` that are on the same host. `key`: that of the run; None if
    this process is not to share memory. `seconds`: how long a peer may take to answer; it makes the same call.

    Collective; `gather` returns what each process passes to it, by rank. A connection that fails is dropped on both
    sides.
    """
    name, listener = uuid.uuid4().hex, None
    if key is not None:
        with suppress(OSError):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(_address(name))
            listener.listen(1024)
    addresses = gather([_host(), name] if listener is not None else None)
    mine = addresses[rank]
    here = [
        peer
        for peer, address in enumerate(addresses)
        if mine is not None and address is not None and address[0] == mine[0]
    ]
    local = sorted(set(peers) & set(here))
    connections: dict[int, socket.socket] = {}
    with suppress(OSError):
        if listener is not None and key is not None:
            for peer in local:
                if peer < rank:
                    connections[peer] = _connect(peer, rank, addresses[peer][1], key, seconds)
            listener.settimeout(seconds)
            connections |= _accept([peer for peer in local if peer > rank], listener, key.derived(name))
    if listener is not None:
        listener.close()
    agreed = gather(list(connections))
    for peer in [peer for peer in connections if rank not in agreed[peer]]:
        connections.pop(peer).close()
    return LocalPeers(connections, len(here))


def _connect(peer: int, rank: int, name: str, key: RunKey, seconds: float) -> socket.socket:
    """Connects with `peer`, which listens under `name`. `OSError` unless it has the key."""
    key = key.derived(name)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        connection.connect(_address(name))
        _check_user(connection)
        challenge, own = _receive(connection, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
        rank_bytes = _RANK.pack(rank)
        connection.sendall(rank_bytes + own + key.proof(b"connect", rank_bytes, challenge, own))
        if not key.proves(_receive(connection, PROOF_BYTES), b"accept", rank_bytes, challenge, own):
            raise ConnectionError(f"what listens for rank {peer} does not have the token of this run")
    except OSError:
        connection.close()
        raise
    return connection


def _accept(peers: Sequence[int], listener: socket.socket, key: RunKey) -> dict[int, socket.socket]:
    """The connections with those of `peers` that come in time. Any process of the host can connect; only those of this
    run stay.
    """
    accepted: dict[int, socket.socket] = {}
    seconds = listener.gettimeout()
    deadline = time.monotonic() + (seconds or 0.0)
    while len(accepted) < len(peers) and (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            break
        try:
            connection.settimeout(_STRANGER_SECONDS)
            _check_user(connection)
            peer = _check(connection, key)
            if peer not in peers or peer in accepted:
                raise ConnectionError(f"rank {peer} connects once more")
        except OSError:
            connection.close()
            continue
        connection.settimeout(seconds)
        accepted[peer] = connection
    return accepted


def _check(connection: socket.socket, key: RunKey) -> int:
    """The rank of the process that has connected. `OSError` unless it has the key."""
    challenge = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(challenge)
    answer = _receive(connection, _RANK.size + _NONCE_BYTES + PROOF_BYTES)
    rank, other = answer[: _RANK.size], answer[_RANK.size : _RANK.size + _NONCE_BYTES]
    if not key.proves(answer[-PROOF_BYTES:], b"connect", rank, challenge, other):
        raise ConnectionError("a process that does not have the token of this run")
    connection.sendall(key.proof(b"accept", rank, challenge, other))
    return int(_RANK.unpack(rank)[0])


def _check_user(connection: socket.socket) -> None:
    """Raises `OSError` unless the other end belongs to the same user: names without a path have no permissions."""
    sent = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(sent)
    if user != os.geteuid():
        raise ConnectionError(f"a process of the user {user}")


def _receive(connection: socket.socket, size: int) -> bytes:
    received = connection.recv(size, socket.MSG_WAITALL)
    if len(received) != size:
        raise ConnectionError("the other end has closed the connection")
    return received


def _address(name: str) -> bytes:
    return b"\0penstock-" + name.encode()


def _host() -> str:
    """Identifies this host and the network namespace of its container, in which the sockets live."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
