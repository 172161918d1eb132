"""The device that a benchmark runs on: what it is, how fast it multiplies, and what is held of its memory.

A GPU is behind the program that drives it, so that clocks are read where `synchronize` has waited for it. A CPU has
nothing to wait for, and no count of what tensors take: its memory is not reported.
"""

import gc
import platform
import subprocess
import time
from dataclasses import dataclass

import torch

WARM_UP_PRODUCTS, PRODUCTS = 50, 100
"""A GPU that was idle takes some milliseconds to reach its clock."""


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

    def held_bytes(self) -> int | None:
        """What tensors of this process take of its memory."""
        return torch.cuda.memory_allocated(self.device) if self._is_gpu else None

    def forget_peak(self) -> None:
        """From here on `peak_bytes` counts."""
        if self._is_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int | None:
        """The most that they took."""
        return torch.cuda.max_memory_allocated(self.device) if self._is_gpu else None

    def tidy(self) -> None:
        """Gives back what nothing refers to any more, to other processes as well."""
        gc.collect()
        if self._is_gpu:
            torch.cuda.empty_cache()

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


def driver_version() -> str:
    """Of NVIDIA's driver; empty where there is none."""
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return told.stdout.partition("\n")[0].strip()
