"""The device that a benchmark runs on: what it is, how fast it multiplies, how it is shared, what its memory holds.

A GPU is behind the program that drives it, so that clocks are read where `synchronize` has waited for it. A CPU has
nothing to wait for, and no count of what tensors take: its memory is not reported.
"""

import gc
import os
import platform
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import torch

WARM_UP_PRODUCTS, PRODUCTS = 50, 100
"""A GPU that was idle takes some milliseconds to reach its clock."""

CORES, SLICES, MPS = "cores of a CPU", "time slicing", "under MPS"
"""How processes share a device."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a process takes of the memory of its device, in bytes, as PyTorch's allocator counts."""

    allocated: int
    """Of tensors that the program still has."""
    active: int
    """And of those that it has given up while a stream may still use them."""
    reserved: int
    """What the allocator has taken from the device, its free blocks among it: this decides about running out."""

    def beyond(self, other: "Memory") -> "Memory":
        """How much more it is than `other`."""
        return Memory(self.allocated - other.allocated, self.active - other.active, self.reserved - other.reserved)


@dataclass(frozen=True, slots=True)
class Card:
    """One device, as this process sees it."""

    device: torch.device

    @property
    def name(self) -> str:
        """What its maker calls it."""
        return torch.cuda.get_device_name(self.device) if self._is_gpu else platform.processor() or platform.machine()

    def synchronize(self) -> None:
        """Waits until it has done all that this process gave it."""
        if self._is_gpu:
            torch.cuda.synchronize(self.device)

    def held(self) -> Memory | None:
        """What this process takes of its memory now; None on a device that does not count."""
        return self._memory("current")

    def forget_peak(self) -> None:
        """From here on `peak` counts."""
        if self._is_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> Memory | None:
        """The most that this process took, each count at its own moment; None on a device that does not count."""
        return self._memory("peak")

    def tidy(self) -> None:
        """Gives back what nothing refers to any more, to other processes as well."""
        gc.collect()
        if self._is_gpu:
            torch.cuda.empty_cache()

    def _memory(self, when: str) -> Memory | None:
        if not self._is_gpu:
            return None
        counts = torch.cuda.memory_stats(self.device)
        # A process that has not touched the device yet has no counts.
        allocated, active, reserved = (
            counts.get(f"{kind}_bytes.all.{when}", 0) for kind in ("allocated", "active", "reserved")
        )
        return Memory(allocated, active, reserved)

    @property
    def _is_gpu(self) -> bool:
        return self.device.type == "cuda"


def matrix_rate(card: Card, size: int, dtype: torch.dtype) -> float:
    """Floating-point operations per second of the product of two matrices of `size` rows and columns, of random
    numbers: products of zeros take less power and are faster.
    """
    left, right = torch.randn(2, size, size, device=card.device).to(dtype)
    for _ in range(WARM_UP_PRODUCTS):
        left @ right
    card.synchronize()
    start = time.perf_counter()
    for _ in range(PRODUCTS):
        left @ right
    card.synchronize()
    return 2 * size**3 * PRODUCTS / (time.perf_counter() - start)


def sharing_of(device: torch.device) -> str:
    """How several processes share `device`: `CORES`, `SLICES` or `MPS`."""
    if device.type == "cpu":
        return CORES
    return MPS if mps_runs() else SLICES


def mps_runs() -> bool:
    """Whether the control daemon of NVIDIA's MPS serves processes that this one starts."""
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    if not (pipes / "control").exists():
        return False
    try:
        # What a daemon that has ended leaves behind answers nothing.
        asked = subprocess.run(
            ["nvidia-cuda-mps-control"], input="get_server_list\n", capture_output=True, text=True, timeout=10
        )
    except FileNotFoundError:
        # Containers see the daemon of their host without having its program.
        return True
    except (OSError, subprocess.SubprocessError):
        return False
    return asked.returncode == 0


def driver_version() -> str:
    """The version of NVIDIA's driver; empty where there is none."""
    try:
        reported = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return reported.stdout.partition("\n")[0].strip()
