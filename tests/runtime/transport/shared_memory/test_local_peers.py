"""Processes of one host open what the others have open, and know which are not on their host."""

import os
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.runtime.transport.shared_memory.local_peers import LocalPeers


def peers_of(rank: int, shares: bool, addresses: dict[int, Any]) -> LocalPeers:
    """What `rank` knows if the other ranks have passed `addresses`."""

    def gather(own: Any) -> Sequence[Any]:
        return [addresses.get(each, own) for each in range(4)]

    return LocalPeers(rank, gather, shares)


def test_a_process_opens_the_pipe_of_another() -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(read, 1)
        os._exit(0)
    address: list[Any] = []
    LocalPeers(0, lambda own: address.append(own) or [own], True)
    peers = peers_of(0, True, {1: (address[0][0], child), 2: ("another host", child), 3: None})
    assert [rank in peers for rank in range(4)] == [True, True, False, False]
    assert peers.processes == 2

    opened = peers.open(1, read, os.O_RDONLY)
    os.close(read)
    os.write(write, b"t")
    os.waitpid(child, 0)
    os.write(write, b"text")
    assert os.read(opened, 9) == b"text"

    # It has ended.
    with pytest.raises(OSError):
        peers.open(1, read, os.O_RDONLY)
    os.close(opened)
    os.close(write)


def test_a_process_that_does_not_share_has_no_peers() -> None:
    peers = peers_of(0, False, {1: ("this host", 1)})

    assert peers.processes == 0
    assert 0 not in peers and 1 not in peers
