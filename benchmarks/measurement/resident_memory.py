"""What this process has resident in memory, now and at most."""

import ctypes
from pathlib import Path

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""In the environment of a process before it starts: freed tensors go back to the system at once, so that what is
resident is what is alive."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def return_what_is_freed() -> None:
    """Does what `ALLOCATOR` does in a process that has started."""
    for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        ctypes.CDLL(None).mallopt(option, 2**16)


def resident_bytes(field: str) -> int:
    """VmRSS: now; VmHWM: the most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024


def own_bytes(field: str) -> float:
    """`resident_bytes` less half of what is shared: the pages of a ring count in both of its processes."""
    return resident_bytes(field) - resident_bytes("RssShmem") / 2


def forget_peak() -> None:
    """Begins to look for the most that is resident anew."""
    Path("/proc/self/clear_refs").write_text("5")
