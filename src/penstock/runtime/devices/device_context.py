"""Where a process computes: its device, and what goes with it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from penstock.runtime.devices.staging import Staging, staging_for
from penstock.runtime.devices.streams import Streams, streams_for
from penstock.runtime.devices.timestamps import Moments, moments_of

__all__ = ["Site", "site_of"]


@dataclass(frozen=True, slots=True)
class Site:
    """Of the ranks of one process."""

    device: torch.device
    staging: Staging
    """To the host and back."""
    streams: Streams
    moments: Moments


def site_of(device: torch.device, ranks: Iterable[int], check: Callable[[], None]) -> Site:
    """The site of `ranks`, which compute on `device`. `check` raises if what comes to them has broken off."""
    return Site(device, staging_for(device, check), streams_for(device, ranks), moments_of(device))
