"""How the processes of a job meet: in the environment of ``torchrun`` or its like, at a store, and in a default group.

``init_process_group`` waits for the other processes for half an hour, and does not tell which of them are missing. So
the processes first meet at the store: each writes that it is there, and waits for the others as long as the user
allows.

torchrun's agent keeps one store for all attempts of a job (torch 2.11 to 2.13), and torch uses the same keys in each.
So after a restart a process finds the addresses of dead processes, and connects to them until its timeout. Here the
ranks of an attempt agree on a name which no other attempt has, and put it before all keys. They cannot count attempts:
those of several hosts disagree about it, and an attempt may end before all have begun. So each draws a name of its
own:

  1. Rank 0 publishes its name. Every other rank answers it with its own.
  2. When all have answered, rank 0 publishes their names under its own.
  3. A rank goes on when its name is among those that are published under rank 0's. Before that it may have read, and
     answered, the name of an earlier rank 0; then it reads again.

The processes of a run may have a token in common, which is never written anywhere. docs/trust.md says what it protects.
"""

import fcntl
import hmac
import json
import os
import secrets
import socket
import struct
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.errors import TransportError
from penstock.runtime.collectives.failures import descriptor_error
from penstock.runtime.collectives.timeouts import run_bounded
from penstock.runtime.devices.communicators import without_monitor
from penstock.torch_internals.distributed import INTERFACE

T = TypeVar("T")

_START = "Start with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every process"
"""What to do about a variable that is missing."""

_TASKS = {
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "FLUX_JOB_SIZE": "FLUX_TASK_RANK",
    "JSM_NAMESPACE_SIZE": "JSM_NAMESPACE_RANK",
    # No variable of Cray's launcher has the number of tasks.
    "": "PALS_RANKID",
}
"""By the variable with the number of tasks that srun, mpirun, flux or another launcher has started, the one with the
number of the task. In an allocation in which one process is started the first is missing or 1, and the second 0."""
_TERMINAL = "SLURM_PTY_PORT"
"""Set by ``srun --pty``: only its first task has the terminal, and the others end."""
TOKEN = "PENSTOCK_TOKEN"
"""The environment variable of the token."""
_LEAST_CHARACTERS = 16
"""A shorter token could be found by trying."""
_POLL_SECONDS = 0.02
_STORE_TIMEOUT = timedelta(minutes=10)
"""How long calls of the finished group may wait at the store; NCCL's of the user's, for example."""
_NEWEST = "penstock/newest attempt"
_READ_ADDRESS = 0x8915
"""Linux's request for the address of an interface."""


def launched_rank() -> tuple[int, int]:
    """The rank of this process and the number of processes, by ``RANK`` and ``WORLD_SIZE``; (0, 1) without both.

    `TransportError` if one of them is missing or is no such number, and if another launcher has started several tasks
    and neither is set: each would train alone.
    """
    if not os.environ.get("RANK") and not os.environ.get("WORLD_SIZE"):
        _refuse_tasks()
        return 0, 1
    processes = _read_number("WORLD_SIZE", 1, None)
    if processes == 1 and not os.environ.get("RANK"):
        return 0, 1
    return _read_number("RANK", 0, processes - 1), processes


def _read_number(name: str, least: int, most: int | None) -> int:
    """The environment variable `name`. `TransportError` unless it is a number from `least` to `most`."""
    text = os.environ.get(name, "").strip()
    if text.isascii() and text.isdecimal() and least <= int(text[:9]) and (most is None or int(text[:9]) <= most):
        return int(text[:9])
    numbers = f"from {least} to {most}" if most is not None else f"of at least {least}"
    both = ", ".join(f"{key}={os.environ[key]}" for key in ("RANK", "WORLD_SIZE") if key in os.environ)
    raise TransportError(
        f"the environment variable {name}: expected a whole number {numbers}, found {repr(text) if text else 'none'} "
        f"({both}). {_START}; unset RANK and WORLD_SIZE for a training of one process"
    )


def _refuse_tasks() -> None:
    """Raises `TransportError` if this process is one of several tasks."""
    if os.environ.get(_TERMINAL):
        return
    for size, number in _TASKS.items():
        tasks, task = os.environ.get(size, ""), os.environ.get(number, "")
        several = int(tasks[:9]) > 1 and bool(task) if tasks.isdecimal() else task.isdecimal() and int(task[:9]) > 0
        if several:
            where, every = (f"{number}, {size}", f"${size}") if tasks else (number, "their number")
            raise TransportError(
                f"this process is task {task} of the {tasks or 'tasks'} that a launcher has started ({where}), and "
                "RANK and WORLD_SIZE are not set: expected ranks of one training, found tasks that would train alone "
                f"each. Start one torchrun per host, or set RANK=${number}, WORLD_SIZE={every}, MASTER_ADDR (task 0's "
                "host) and MASTER_PORT in every task. For a training of its own in each task, set WORLD_SIZE=1"
            )


def make_default_group(rank: int, processes: int, timeout_seconds: float) -> None:
    """Makes the default group of `processes`, of which this is `rank`: Gloo for the host, and NCCL for GPUs if there
    are any.

    `TransportError` if the environment has no address to meet at, or if ranks do not come within `timeout_seconds`.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), _read_number("MASTER_PORT", 1, 65535)
    if not host:
        raise TransportError(f"the environment variable MASTER_ADDR: expected the host of rank 0, found none. {_START}")
    # Under torchrun its agent holds the store; otherwise rank 0 does.
    serves = rank == 0 and not _shares_store()
    deadline = time.monotonic() + timeout_seconds

    holder = "torchrun" if _shares_store() else "rank 0, which holds the store"
    if not serves:
        _wait_until_listening(host, port, deadline, partial(_absence, f"{holder} at {host}:{port}", timeout_seconds))

    def connect() -> TCPStore:
        limit = timedelta(seconds=timeout_seconds)
        return TCPStore(host, port, is_master=serves, timeout=limit, wait_for_workers=False, multi_tenant=True)

    # The connection has the same time limit. If both ended at once, the thread of the call could come back while the
    # interpreter ends, and torch would abort the process.
    store: Store = call_at_meeting(connect, deadline + 2.0, timeout_seconds, f"{holder} at {host}:{port}")
    if _shares_store():
        shared = store
        store = call_at_meeting(
            lambda: _attempt_store(shared, rank, processes, deadline),
            deadline + 1.0,
            timeout_seconds,
            f"an answer of the store at {host}:{port}",
        )
    keys = [f"came/{other}" for other in range(processes)]
    met = PrefixStore("penstock", store)

    def meet() -> list[int]:
        """Waits for the others until the deadline; returns those that have not come."""
        met.set(keys[rank], "")
        while not met.check(keys) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return [other for other, key in enumerate(keys) if not met.check([key])]

    late = call_at_meeting(meet, deadline + 1.0, timeout_seconds, f"an answer of the store at {host}:{port}")
    if late:
        raise _absence(f"rank {', '.join(map(str, late))}", timeout_seconds)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store.set_timeout(_STORE_TIMEOUT)
    _choose_interface(host, port)
    own: Store = PrefixStore("default_pg", store)
    with without_monitor():
        call_at_meeting(
            lambda: dist.init_process_group(backend, store=own, rank=rank, world_size=processes),
            deadline + timeout_seconds,
            timeout_seconds,
            "one of the other ranks, all of which had come before",
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


def call_at_meeting(work: Callable[[], T], deadline: float, timeout_seconds: float, awaited: str) -> T:
    """Returns ``work()``, which waits for `awaited`. `TransportError` at `deadline`, in seconds of ``time.monotonic``,
    or if the call fails.
    """

    def check() -> None:
        if time.monotonic() > deadline:
            raise _absence(awaited, timeout_seconds)

    try:
        return run_bounded(work, "meeting", check)
    except RuntimeError as error:
        if (own := descriptor_error("meeting the other ranks", error)) is not None:
            raise own from error
        raise _absence(awaited, timeout_seconds, f" torch.distributed says: {error}") from error


def _absence(who: str, seconds: float, cause: str = "") -> TransportError:
    return TransportError(
        f"the ranks meet before they build their pipelines: expected {who} within {seconds:g} s, and it did not come. "
        "It was not started, ended before, or is still busy before it builds its pipeline: look at its log, or pass a "
        f"larger timeout_seconds=.{cause}"
    )


def _shares_store() -> bool:
    """Whether torchrun gives all attempts of this job one store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _attempt_store(store: Store, rank: int, ranks: int, deadline: float) -> Store:
    """The keys of this attempt in the `store` of all attempts. Collective.

    `TransportError` if the others do not come before `deadline`, in seconds of ``time.monotonic``.
    """
    name = _lead(store, ranks, deadline) if rank == 0 else _follow(store, rank, deadline)
    return PrefixStore(f"attempt {name}", store)


def _lead(store: Store, ranks: int, deadline: float) -> str:
    token = uuid.uuid4().hex
    store.set(_NEWEST, token)
    answers = [_answer(token, rank) for rank in range(1, ranks)]
    while not store.check(answers):
        missing = [rank for rank in range(1, ranks) if not store.check([_answer(token, rank)])]
        _sleep(deadline, f"rank 0 waited for rank(s) {', '.join(map(str, missing))}")
    store.set(_began(token), json.dumps([token, *(store.get(answer).decode() for answer in answers)]))
    return token


def _follow(store: Store, rank: int, deadline: float) -> str:
    own, answered = uuid.uuid4().hex, ""
    while True:
        if store.check([_NEWEST]):
            token = store.get(_NEWEST).decode()
            if token != answered:
                # An earlier process of this rank may have answered the same rank 0, which then does not know this one.
                store.set(_answer(token, rank), own)
                answered = token
            if store.check([_began(token)]) and own in json.loads(store.get(_began(token))):
                return token
        _sleep(deadline, f"rank {rank} waited for rank 0")


def _answer(token: str, rank: int) -> str:
    return f"penstock/answer {token}/{rank}"


def _began(token: str) -> str:
    return f"penstock/began {token}"


def _sleep(deadline: float, waiting: str) -> None:
    if time.monotonic() > deadline:
        run = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        raise TransportError(
            f"joining the processes of attempt {run} of this job: {waiting} until the timeout. Expected all "
            "processes of torchrun to build their pipeline, found that some did not: look at their logs"
        )
    time.sleep(_POLL_SECONDS)


def _choose_interface(host: str, port: int) -> None:
    """Sets `INTERFACE` to the interface over which this process reaches `host`, where Gloo would choose one that no
    other host reaches.

    Gloo takes the address that the host's own name stands for. On many machines that is 127.0.0.1, since a line of
    ``/etc/hosts`` says so, and processes of two hosts then try to connect to themselves.
    """
    own = ""
    with suppress(OSError):
        own = socket.gethostbyname(socket.gethostname())
    if os.environ.get(INTERFACE) or (own and not ip_address(own).is_loopback):
        return
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent.
        probe.connect((host, port))
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            if not ip_address(address).is_loopback and _address_of(name, probe) == address:
                os.environ[INTERFACE] = name
                return


def _address_of(interface: str, asking: socket.socket) -> str:
    """The IPv4 address of `interface`; empty if there is none, or on another system than Linux."""
    with suppress(OSError):
        answer = fcntl.ioctl(asking.fileno(), _READ_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


def check_token(rank: int, gather: Callable[[str], Sequence[str]]) -> None:
    """Returns after all processes have proved to each other that they have the same token, or none has one. Collective.

    `gather` returns the text that each process passes to it, by rank. `TransportError` on every rank if the token of
    one of them is another one, or too short to protect anything. Every process contributes a random number, so what was
    recorded in another run proves nothing in this one.
    """
    token = os.environ.get(TOKEN)
    numbers = " ".join(gather(secrets.token_hex(16)))

    def proof_of(other: int) -> str:
        return hmac.new(token.encode(), f"{other} {numbers}".encode(), "sha256").hexdigest() if token else ""

    usable = token is None or len(token) >= _LEAST_CHARACTERS
    proofs = gather(proof_of(rank) if usable else "none")
    if not usable:
        raise TransportError(
            f"{TOKEN} on rank {rank}: expected at least {_LEAST_CHARACTERS} characters, found {len(token or '')}. Set "
            "it to the same random text on every rank (openssl rand -hex 32), or unset it on all"
        )
    others = [
        str(other)
        for other, proof in enumerate(proofs)
        if not hmac.compare_digest(proof.encode(), proof_of(other).encode())
    ]
    if others:
        raise TransportError(
            f"rank(s) {', '.join(others)} and rank {rank} have different tokens: expected the same {TOKEN} on every "
            f"rank, found {'one that is set' if token is not None else 'none'} on rank {rank}. Set it to the same text "
            "on every rank, or unset it on all"
        )
