"""Where a process computes: its device, and what goes with it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from penstock.runtime.devices.staging import Staging, staging_for
from penstock.runtime.devices.streams import Streams, streams_for
from penstock.runtime.devices.timestamps import Timer, timer_for

__all__ = ["DeviceContext", "make_device_context"]


@dataclass(frozen=True, slots=True)
class DeviceContext:
    """Of the ranks of one process."""

    device: torch.device
    staging: Staging
    """To the host and back."""
    streams: Streams
    timer: Timer


def make_device_context(device: torch.device, ranks: Iterable[int], check: Callable[[], None]) -> DeviceContext:
    """The site of `ranks`, which compute on `device`. `check` raises if what comes to them has broken off."""
    return DeviceContext(device, staging_for(device, check), streams_for(device, ranks), timer_for(device))
