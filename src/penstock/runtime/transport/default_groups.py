"""The default group of ``torch.distributed``, made of the environment that ``torchrun`` and its like set.

``init_process_group`` waits for the other processes for half an hour, and does not tell which of them are missing. So
the processes first meet at the store: each writes that it is there, and waits for the others as long as the user
allows.
"""

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.errors import TransportError
from penstock.runtime.transport.attempts import attempt_store, shares_store
from penstock.runtime.transport.descriptor_limits import descriptor_error
from penstock.runtime.transport.launches import START, read_number
from penstock.runtime.transport.network_interfaces import choose_interface
from penstock.runtime.transport.timeouts import run_bounded

T = TypeVar("T")
_POLL_SECONDS = 0.02
_STORE_TIMEOUT = timedelta(minutes=10)
"""How long calls of the finished group may wait at the store; NCCL's of the user's, for example."""


def make_default_group(rank: int, processes: int, timeout_seconds: float) -> None:
    """Makes the default group of `processes`, of which this is `rank`: Gloo for the host, and NCCL for GPUs if there
    are any.

    `TransportError` if the environment has no address to meet at, or if ranks do not come within `timeout_seconds`.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), read_number("MASTER_PORT", 1, 65535)
    if not host:
        raise TransportError(f"the environment variable MASTER_ADDR: expected the host of rank 0, found none. {START}")
    # Under torchrun its agent holds the store; otherwise rank 0 does.
    serves = rank == 0 and not shares_store()
    deadline = time.monotonic() + timeout_seconds

    holder = "torchrun" if shares_store() else "rank 0, which holds the store"
    if not serves:
        _wait_until_listening(
            host, port, deadline, lambda cause: _absence(f"{holder} at {host}:{port}", timeout_seconds, cause)
        )

    def connect() -> TCPStore:
        limit = timedelta(seconds=timeout_seconds)
        return TCPStore(host, port, is_master=serves, timeout=limit, wait_for_workers=False, multi_tenant=True)

    # The connection has the same time limit. If both ended at once, the thread of the call could come back while the
    # interpreter ends, and torch would abort the process.
    store: Store = call_at_meeting(connect, deadline + 2.0, timeout_seconds, lambda: f"{holder} at {host}:{port}")
    if shares_store():
        shared = store
        store = call_at_meeting(
            lambda: attempt_store(shared, rank, processes, deadline),
            deadline + 1.0,
            timeout_seconds,
            lambda: f"an answer of the store at {host}:{port}",
        )
    keys = [f"came/{other}" for other in range(processes)]
    met = PrefixStore("penstock", store)

    def meet() -> list[int]:
        """Waits for the others until the deadline; returns those that have not come."""
        met.set(keys[rank], "")
        while not met.check(keys) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return [other for other, key in enumerate(keys) if not met.check([key])]

    late = call_at_meeting(meet, deadline + 1.0, timeout_seconds, lambda: f"an answer of the store at {host}:{port}")
    if late:
        raise _absence(f"rank {', '.join(map(str, late))}", timeout_seconds)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store.set_timeout(_STORE_TIMEOUT)
    choose_interface(host, port)
    own: Store = PrefixStore("default_pg", store)
    call_at_meeting(
        lambda: dist.init_process_group(backend, store=own, rank=rank, world_size=processes),
        deadline + timeout_seconds,
        timeout_seconds,
        lambda: "one of the other ranks, all of which had come before",
    )


def _wait_until_listening(host: str, port: int, deadline: float, absence: Callable[[str], TransportError]) -> None:
    """Waits until a server can be connected to. Torch's own attempts cannot be given up: a thread that is in one when
    the interpreter ends aborts the process.
    """
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((host, port), timeout=max(0.1, left)).close()
        except OSError as error:
            if (own := descriptor_error("connecting to the store", error)) is not None:
                raise own from error
            if time.monotonic() > deadline:
                raise absence(f" The last attempt to connect: {error}") from error
            time.sleep(_POLL_SECONDS)
        else:
            return


def call_at_meeting(work: Callable[[], T], deadline: float, timeout_seconds: float, awaited: Callable[[], str]) -> T:
    """Returns ``work()``, which waits for `awaited`. `TransportError` at `deadline`, in seconds of ``time.monotonic``,
    or if the call fails.
    """

    def check() -> None:
        if time.monotonic() > deadline:
            raise _absence(awaited(), timeout_seconds)

    try:
        return run_bounded(work, "meeting", check)
    except RuntimeError as error:
        if (own := descriptor_error("meeting the other ranks", error)) is not None:
            raise own from error
        raise _absence(awaited(), timeout_seconds, f" torch.distributed says: {error}") from error


def _absence(who: str, seconds: float, cause: str = "") -> TransportError:
    return TransportError(
        f"the ranks meet before they build their pipelines: expected {who} within {seconds:g} s, and it did not come. "
        "It was not started, ended before, or is still busy before it builds its pipeline: look at its log, or pass a "
        f"larger timeout_seconds=.{cause}"
    )
