"""What carries the messages of each edge: shared memory, NCCL, or Gloo, which works everywhere.

  shared memory  between processes of one host that compute on CPUs
  NCCL           between GPUs, each of one process: what stages send each other, and sums over replicas
  Gloo           all else; tensors of a GPU pass through host memory. NCCL refuses two processes on one GPU. Reports are
                 read on the host, and buffers are shared once in a while: neither is worth a communicator's memory.

Law of this file: every rank chooses from what all ranks said, so that all choose the same.
"""

import os
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

import torch
import torch.distributed as dist

from penstock.errors import TransportError
from penstock.runtime.transport import Edge

__all__ = ["NCCL", "SHARED_MEMORY", "Card", "Carrier", "card_of", "choose", "sums_over_nccl"]

SHARED_MEMORY = "PENSTOCK_SHARED_MEMORY"
"""The environment variable that, if it is 0, has the processes of one host use Gloo like those of several."""
NCCL = "PENSTOCK_NCCL"
"""The environment variable that, if it is 0, has GPUs use Gloo; if it is 1, NCCL is also tried between processes that
share a GPU, which it may refuse."""
_LANES = ("stages", "probe")
"""The lanes whose messages are worth a communicator."""


class Carrier(Enum):
    """Of an edge's messages."""

    MEMORY = "shared memory"
    NCCL = "NCCL"
    GLOO = "Gloo"


class Card(NamedTuple):
    """What a process says of itself."""

    gpu: str
    """What no other GPU anywhere is called; empty without one."""
    wish: str
    """What the environment variable `NCCL` says: "0", "1", or "" for nothing."""


def card_of(device: torch.device) -> Card:
    """Of this process, which computes on `device`. `TransportError` if the environment makes no sense."""
    wish = os.environ.get(NCCL, "")
    if wish not in ("", "0", "1"):
        raise TransportError(
            f"the environment variable {NCCL} is {wish!r}: expected 0 (GPUs send over Gloo), 1 (over NCCL, also where "
            "processes share one) or nothing (over NCCL where every process has its own)"
        )
    if device.type != "cuda" or not dist.is_nccl_available():
        return Card("", wish)
    return Card(str(torch.cuda.get_device_properties(device).uuid), wish)


def choose(edges: Iterable[Edge], cards: Sequence[Card], shared: Collection[Edge]) -> dict[Edge, Carrier]:
    """What carries each of `edges`, in their order. `cards`: of all ranks; `shared`: the edges whose ends have met."""
    chosen = {}
    for edge in edges:
        if edge in shared:
            chosen[edge] = Carrier.MEMORY
        elif edge.lane in _LANES and _can_meet([cards[edge.source], cards[edge.target]]):
            chosen[edge] = Carrier.NCCL
        else:
            chosen[edge] = Carrier.GLOO
    return chosen


def sums_over_nccl(ranks: Sequence[int], cards: Sequence[Card]) -> bool:
    """Whether `ranks` sum over NCCL."""
    return _can_meet([cards[rank] for rank in ranks])


def _can_meet(cards: Sequence[Card]) -> bool:
    """Whether NCCL can connect the processes of `cards`."""
    if any(not card.gpu or card.wish == "0" for card in cards):
        return False
    return len({card.gpu for card in cards}) == len(cards) or all(card.wish == "1" for card in cards)
