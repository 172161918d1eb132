"""Selects the backend of each edge: shared memory, NCCL, or Gloo, which works everywhere.

  shared memory  between processes of one host that compute on CPUs
  NCCL           between processes with a GPU each: messages between stages, and sums over replicas
  Gloo           everything else; tensors of a GPU pass through host memory. It also carries messages between two
                 processes on one GPU, which NCCL refuses, and reports and buffers. Reports are read on the host, and
                 buffers are shared rarely, so neither is worth the memory of a communicator.

Invariant of this file: every rank chooses by the same data, gathered from all ranks, so all choose the same backends.
"""

import logging
import os
import socket
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

import torch

from penstock.errors import TransportError, visible
from penstock.runtime.devices.accelerators import accelerator_of
from penstock.runtime.devices.local_devices import CONNECTIONS, count_queues
from penstock.runtime.transport.transport import Channel, Edge

SHARED_MEMORY = "PENSTOCK_SHARED_MEMORY"
"""An environment variable. 0 makes the processes of one host use Gloo, like those of several hosts."""
NCCL = "PENSTOCK_NCCL"
"""An environment variable. 0 makes GPUs use Gloo. 1 tries NCCL also between processes that share a GPU, which NCCL may
refuse.
"""
_CTAS = "PENSTOCK_NCCL_CTAS"
"""An environment variable: how many multiprocessors of a GPU a message between stages may occupy. A sum over replicas
may occupy twice as many.
"""
_FEW_CTAS = 2
"""Two multiprocessors move about 40 GB/s over NVLink. A message then takes far less time than the microbatch that is
computed at the same time.
"""
_OWN_STREAMS = 4
"""The number of streams for computation, updates, and copies from and to the host."""
_MANY_COMMUNICATORS = 24
"""More communicators than this cause a warning. PyTorch has 32 streams of high priority for each GPU, which NCCL's
communicators take round-robin.
"""
_NCCL_CHANNELS = (Channel.STAGES, Channel.PROBE)
"""The channels whose messages are worth a communicator."""


class Backend(Enum):
    """Names the library that carries the messages of an edge."""

    MEMORY = "shared memory"
    NCCL = "NCCL"
    """NCCL, or the library of another kind of accelerator."""
    GLOO = "Gloo"


class DeviceInfo(NamedTuple):
    """Describes the device of a process; all processes gather these."""

    gpu: str
    """A globally unique identifier of the GPU; empty if there is none that a ``torch.distributed`` backend supports."""
    nccl_setting: str = ""
    """The value of the environment variable `NCCL`: "0", "1", or "" if it is not set."""
    host: str = ""
    visible: int = 0
    """The number of GPUs that the process sees."""
    backend: str = "nccl"
    """The ``torch.distributed`` backend between such GPUs."""


def device_info_of(device: torch.device) -> DeviceInfo:
    """Describes `device`, on which this process computes. `TransportError` if an environment variable is invalid."""
    nccl_setting = os.environ.get(NCCL, "")
    if nccl_setting not in ("", "0", "1"):
        raise TransportError(
            f"the environment variable {NCCL} is {nccl_setting!r}: expected 0 (GPUs send over Gloo), 1 (over NCCL, "
            "also where processes share one) or nothing (over NCCL where every process has its own GPU)"
        )
    accelerator = accelerator_of(device)
    if accelerator is None or not accelerator.backend:
        return DeviceInfo("", nccl_setting)
    return DeviceInfo(accelerator.name, nccl_setting, socket.gethostname(), accelerator.visible, accelerator.backend)


def ctas_per_message() -> int:
    """The number of multiprocessors that a message may occupy. `TransportError` if the setting is invalid."""
    setting = os.environ.get(_CTAS, str(_FEW_CTAS))
    if not setting.isdecimal() or not 1 <= int(setting) <= 64:
        raise TransportError(
            f"the environment variable {_CTAS} is {setting!r}: expected a number from 1 to 64, the multiprocessors of "
            f"the GPU that a message between stages may occupy, or nothing ({_FEW_CTAS})"
        )
    return int(setting)


def warn_of_many_communicators(communicators: int, rank: int) -> None:
    """Logs a warning if `rank` has too many `communicators` between GPUs: two may get the same stream, or streams may
    share one of CUDA's queues to the GPU and wait for each other.
    """
    log = logging.getLogger("penstock")
    if communicators and communicators + _OWN_STREAMS > count_queues():
        log.warning(
            "rank %d computes and sends in %d streams, and CUDA feeds its GPU through %d queues: expected a queue for "
            "each, since streams that share one wait for each other. Set %s=32 before the GPU is first used, as "
            "penstock.local_device() does",
            rank,
            communicators + _OWN_STREAMS,
            count_queues(),
            CONNECTIONS,
        )
    if communicators > _MANY_COMMUNICATORS:
        log.warning(
            "rank %d has %d NCCL communicators: expected %d at most, since each takes one of the 32 streams that "
            "PyTorch has for them, and two in one stream may deadlock. Replicate neighbour stages "
            "equally often, so that each replica has one neighbour, or plan fewer replicas",
            rank,
            communicators,
            _MANY_COMMUNICATORS,
        )


def warn_of_shared_gpus(devices: Sequence[DeviceInfo], rank: int) -> None:
    """Logs a warning if ranks share a GPU while other GPUs of their host are unused. Only the first of them logs it."""
    users: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for other, device in enumerate(devices):
        if device.gpu:
            users[device.host, device.gpu].append(other)
    for (host, gpu), ranks in users.items():
        used = sum(other == host for other, _ in users)
        if ranks[0] == rank and len(ranks) > 1 and used < devices[rank].visible:
            logging.getLogger("penstock").warning(
                "ranks %s compute on one GPU (%s on %s), and %d of the %d GPUs there compute nothing: expected one "
                "rank on each. Move the model and the batches to penstock.local_device(), which follows LOCAL_RANK",
                ", ".join(map(str, ranks)),
                visible(gpu),
                visible(host),
                devices[rank].visible - used,
                devices[rank].visible,
            )


def select_backends(
    edges: Iterable[Edge], devices: Sequence[DeviceInfo], shared: Collection[Edge]
) -> dict[Edge, Backend]:
    """The backend of each edge, in the order of `edges`. `devices`: those of all ranks. `shared`: the edges whose two
    processes have connected over shared memory.
    """
    chosen = {}
    for edge in edges:
        if edge in shared:
            chosen[edge] = Backend.MEMORY
        elif edge.channel in _NCCL_CHANNELS and _nccl_can_connect([devices[edge.source], devices[edge.target]]):
            chosen[edge] = Backend.NCCL
        else:
            chosen[edge] = Backend.GLOO
    return chosen


def sums_over_nccl(ranks: Sequence[int], devices: Sequence[DeviceInfo]) -> bool:
    """Whether sums over `ranks` use NCCL."""
    return _nccl_can_connect([devices[rank] for rank in ranks])


def _nccl_can_connect(devices: Sequence[DeviceInfo]) -> bool:
    """Whether NCCL can connect the processes of `devices`."""
    if any(not device.gpu or device.nccl_setting == "0" for device in devices):
        return False
    if len({device.backend for device in devices}) > 1:
        return False
    own_gpus = len({device.gpu for device in devices}) == len(devices)
    return own_gpus or all(device.nccl_setting == "1" for device in devices)
