"""Opens what other processes of this host have open: their memory, and the ends of their pipes.

Linux shows the open files of a process in ``/proc``. It lets a process of the same user open them that could read the
memory of that process anyway, and no other one. So nothing listens, nothing has a name, and nothing has to be proved.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Gather: TypeAlias = Callable[[Any], Sequence[Any]]


class LocalPeers:
    """The processes that share memory on the host of `rank`. `shares`: whether this one does. Collective: `gather`
    returns what each process passes to it, by rank.
    """

    def __init__(self, rank: int, gather: Gather, shares: bool) -> None:
        addresses = gather(_address() if shares else None)
        own = addresses[rank]
        self._numbers = {
            peer: int(address[1])
            for peer, address in enumerate(addresses)
            if own is not None and address is not None and address[0] == own[0]
        }
        self.processes = len(self._numbers)
        """The number of such processes, including this one."""

    def __contains__(self, rank: int) -> bool:
        return rank in self._numbers

    def open(self, rank: int, descriptor: int, flags: int) -> int:
        """Opens the file that is `descriptor` in the process of `rank`. `OSError` if that has ended, or forbids it:
        the transport then uses Gloo for the edge.
        """
        return os.open(f"/proc/{self._numbers[rank]}/fd/{int(descriptor)}", flags | os.O_NONBLOCK)


def _address() -> tuple[str, int]:
    """The host and the container in which the number of this process is known, and that number."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
        return " ".join([file.read().strip(), *spaces]), int(os.readlink("/proc/self"))
