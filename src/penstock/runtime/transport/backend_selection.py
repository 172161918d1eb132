"""What carries the messages of each edge: shared memory, NCCL, or Gloo, which works everywhere.

  shared memory  between processes of one host that compute on CPUs
  NCCL           between GPUs, each of one process: what stages send each other, and sums over replicas
  Gloo           all else; tensors of a GPU pass through host memory. NCCL refuses two processes on one GPU. Reports are
                 read on the host, and buffers are shared once in a while: neither is worth a communicator's memory.

Law of this file: every rank chooses from what all ranks said, so that all choose the same.
"""

import logging
import os
import socket
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

import torch

from penstock.errors import TransportError
from penstock.runtime.devices.accelerators import accelerator_of
from penstock.runtime.devices.local_devices import CONNECTIONS, count_queues
from penstock.runtime.transport.transport import Edge

__all__ = [
    "NCCL",
    "SHARED_MEMORY",
    "Backend",
    "DeviceInfo",
    "channels",
    "device_info_of",
    "select_backends",
    "sums_over_nccl",
    "warn_of_many",
    "warn_of_sharing",
]

SHARED_MEMORY = "PENSTOCK_SHARED_MEMORY"
"""The environment variable that, if it is 0, has the processes of one host use Gloo like those of several."""
NCCL = "PENSTOCK_NCCL"
"""The environment variable that, if it is 0, has GPUs use Gloo; if it is 1, NCCL is also tried between processes that
share a GPU, which it may refuse."""
CTAS = "PENSTOCK_NCCL_CTAS"
"""The environment variable that says how many multiprocessors of a GPU a message between stages may take. A sum over
replicas may take twice as many."""
FEW_CTAS = 2
"""They move some 40 GB/s over NVLink, in far less time than the microbatch takes that goes on beside them."""
OWN_STREAMS = 4
"""The computation, the updates, and copies from and to the host."""
MANY_COMMUNICATORS = 24
"""PyTorch has 32 streams of high priority for each GPU, which NCCL's communicators take in turn."""
_LANES = ("stages", "probe")
"""The lanes whose messages are worth a communicator."""


class Backend(Enum):
    """Of an edge's messages."""

    MEMORY = "shared memory"
    NCCL = "NCCL"
    """Or what takes its place with another kind of accelerator."""
    GLOO = "Gloo"


class DeviceInfo(NamedTuple):
    """What a process says of itself."""

    gpu: str
    """What no other GPU anywhere is called; empty without one that can send by itself."""
    wish: str = ""
    """What the environment variable `NCCL` says: "0", "1", or "" for nothing."""
    host: str = ""
    visible: int = 0
    """How many GPUs this process sees."""
    backend: str = "nccl"
    """Of ``torch.distributed``, between GPUs."""


def device_info_of(device: torch.device) -> DeviceInfo:
    """Of this process, which computes on `device`. `TransportError` if the environment makes no sense."""
    wish = os.environ.get(NCCL, "")
    if wish not in ("", "0", "1"):
        raise TransportError(
            f"the environment variable {NCCL} is {wish!r}: expected 0 (GPUs send over Gloo), 1 (over NCCL, also where "
            "processes share one) or nothing (over NCCL where every process has its own)"
        )
    accelerator = accelerator_of(device)
    if accelerator is None or not accelerator.backend:
        return DeviceInfo("", wish)
    return DeviceInfo(accelerator.name, wish, socket.gethostname(), accelerator.visible, accelerator.backend)


def channels() -> int:
    """How many multiprocessors a message may take. `TransportError` if the environment makes no sense."""
    wish = os.environ.get(CTAS, str(FEW_CTAS))
    if not wish.isdecimal() or not 1 <= int(wish) <= 64:
        raise TransportError(
            f"the environment variable {CTAS} is {wish!r}: expected a number from 1 to 64, the multiprocessors of the "
            f"GPU that a message between stages may take, or nothing ({FEW_CTAS})"
        )
    return int(wish)


def warn_of_many(communicators: int, rank: int) -> None:
    """Logs a warning if `rank` has so many `communicators` between GPUs that their streams may be the same ones, or
    wait for each other in the queues by which CUDA feeds the GPU.
    """
    log = logging.getLogger("penstock")
    if communicators and communicators + OWN_STREAMS > count_queues():
        log.warning(
            "rank %d computes and sends in %d streams, and CUDA feeds its GPU by %d queues: expected a queue for each, "
            "since streams that share one wait for each other. Set %s=32 before the GPU is first used, as "
            "penstock.local_device() does",
            rank,
            communicators + OWN_STREAMS,
            count_queues(),
            CONNECTIONS,
        )
    if communicators > MANY_COMMUNICATORS:
        log.warning(
            "rank %d has %d NCCL communicators: expected %d at most, since each takes one of the 32 streams that "
            "PyTorch has for them, and two in one stream may wait for each other for ever. Replicate neighbour stages "
            "equally often, so that each replica has one neighbour, or plan fewer replicas",
            rank,
            communicators,
            MANY_COMMUNICATORS,
        )


def warn_of_sharing(cards: Sequence[DeviceInfo], rank: int) -> None:
    """Logs a warning on the first of the ranks that share a GPU where their host has others that nobody uses."""
    users: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for other, card in enumerate(cards):
        if card.gpu:
            users[card.host, card.gpu].append(other)
    for (host, gpu), ranks in users.items():
        used = sum(other == host for other, _ in users)
        if ranks[0] == rank and len(ranks) > 1 and used < cards[rank].visible:
            logging.getLogger("penstock").warning(
                "ranks %s compute on one GPU (%s on %s), and %d of the %d GPUs there compute nothing: expected one "
                "rank for each. Move the model and the batches to penstock.local_device(), which follows LOCAL_RANK",
                ", ".join(map(str, ranks)),
                gpu,
                host,
                cards[rank].visible - used,
                cards[rank].visible,
            )


def select_backends(
    edges: Iterable[Edge], cards: Sequence[DeviceInfo], shared: Collection[Edge]
) -> dict[Edge, Backend]:
    """What carries each of `edges`, in their order. `cards`: of all ranks; `shared`: the edges whose ends have met."""
    chosen = {}
    for edge in edges:
        if edge in shared:
            chosen[edge] = Backend.MEMORY
        elif edge.lane in _LANES and _can_meet([cards[edge.source], cards[edge.target]]):
            chosen[edge] = Backend.NCCL
        else:
            chosen[edge] = Backend.GLOO
    return chosen


def sums_over_nccl(ranks: Sequence[int], cards: Sequence[DeviceInfo]) -> bool:
    """Whether `ranks` sum over NCCL."""
    return _can_meet([cards[rank] for rank in ranks])


def _can_meet(cards: Sequence[DeviceInfo]) -> bool:
    """Whether NCCL can connect the processes of `cards`."""
    if any(not card.gpu or card.wish == "0" for card in cards) or len({card.backend for card in cards}) > 1:
        return False
    return len({card.gpu for card in cards}) == len(cards) or all(card.wish == "1" for card in cards)
