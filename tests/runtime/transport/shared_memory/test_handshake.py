"""Processes of one host connect with those of their run, and with no other."""

import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from penstock.runtime.transport.run_keys import RunKey
from penstock.runtime.transport.shared_memory.handshake import LocalPeers, connect_local_peers

KEY = RunKey(b"the key of this run")


class Ranks:
    """Two ranks in threads, which connect. `meddle` is called with what they have gathered in the first round."""

    def __init__(
        self,
        keys: Sequence[RunKey | None],
        meddle: Callable[[list[Any]], None] = lambda _: None,
        seconds: float = 60.0,
    ) -> None:
        self._keys, self._meddle, self._seconds = keys, meddle, seconds
        self._gathered: dict[int, list[Any]] = {0: [None, None], 1: [None, None]}
        self._barrier = threading.Barrier(2)
        self.peers: dict[int, LocalPeers] = {}

    def connect(self) -> list[bool]:
        """Whether each has a connection with the other."""
        threads = [threading.Thread(target=self._run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [1 in self.peers[0], 0 in self.peers[1]]

    def _run(self, rank: int) -> None:
        rounds = iter(range(2))

        def gather(value: Any) -> Sequence[Any]:
            round_ = next(rounds)
            self._gathered[round_][rank] = value
            self._barrier.wait()
            if rank == 0 and round_ == 0:
                self._meddle(self._gathered[0])
            self._barrier.wait()
            return list(self._gathered[round_])

        self.peers[rank] = connect_local_peers([1 - rank], rank, gather, self._keys[rank], seconds=self._seconds)


def test_ranks_of_one_run_pass_each_other_files() -> None:
    ranks = Ranks([KEY, KEY])

    assert ranks.connect() == [True, True]
    read, write = os.pipe()
    ranks.peers[0].send_fds(1, [write])
    (received,) = ranks.peers[1].recv_fds(0, 1)
    os.write(received, b"text")
    assert os.read(read, 9) == b"text"
    for descriptor in (read, write, received):
        os.close(descriptor)
    for peers in ranks.peers.values():
        peers.close()


def test_ranks_with_other_tokens_do_not_connect() -> None:
    assert Ranks([KEY, RunKey(b"that of another run")], seconds=0.5).connect() == [False, False]


def test_a_rank_may_have_it_disabled() -> None:
    assert Ranks([KEY, None]).connect() == [False, False]


@pytest.mark.parametrize("text", [b"", b"x" * 8, b"\0" * 56, b"x" * 200], ids=["nothing", "little", "zeros", "much"])
def test_a_stranger_is_turned_away_and_the_others_connect(text: bytes) -> None:
    strangers: list[socket.socket] = []

    def connect_first(addresses: list[Any]) -> None:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.connect(b"\0penstock-" + addresses[0][1].encode())
        stranger.sendall(text)
        stranger.shutdown(socket.SHUT_WR)
        strangers.append(stranger)

    ranks = Ranks([KEY, KEY], connect_first)

    assert ranks.connect() == [True, True]
    (stranger,) = strangers
    stranger.settimeout(30.0)
    received = b""
    # What it has sent without being read resets the connection.
    with suppress(ConnectionResetError):
        while more := stranger.recv(4096):
            received += more
    assert len(received) <= 16, "a stranger gets a random number and nothing else"
    stranger.close()
    for peers in ranks.peers.values():
        peers.close()


def test_who_listens_in_place_of_a_rank_gets_no_files() -> None:
    """A process that has taken over a rank's address does not have its key."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(b"\0penstock-stranger")
    listener.listen(1)

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"c" * 16)
            connection.recv(56, socket.MSG_WAITALL)
            connection.sendall(b"p" * 32)

    def take_over(addresses: list[Any]) -> None:
        addresses[0] = [addresses[0][0], "stranger"]

    thread = threading.Thread(target=answer)
    thread.start()
    ranks = Ranks([KEY, KEY], take_over, seconds=0.5)
    # Rank 0 waits for rank 1, which talks to the stranger.
    connected = ranks.connect()
    thread.join()
    listener.close()

    assert connected == [False, False]
