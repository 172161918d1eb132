"""The device of a process, with its streams, its timer and its copies to and from the host."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from penstock.runtime.devices.staging import Staging, staging_for
from penstock.runtime.devices.streams import Streams, streams_for
from penstock.runtime.devices.timestamps import Timer, timer_for


@dataclass(frozen=True, slots=True)
class DeviceContext:
    """Holds what the ranks of one process compute with."""

    device: torch.device
    staging: Staging
    """Copies tensors to the host and back."""
    streams: Streams
    timer: Timer


def make_device_context(device: torch.device, ranks: Iterable[int], check: Callable[[], None]) -> DeviceContext:
    """Makes the context of `ranks`, which compute on `device`. `check` raises if their messages have been aborted."""
    return DeviceContext(device, staging_for(device, check), streams_for(device, ranks), timer_for(device))
