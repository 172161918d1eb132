"""The peak rates of GPUs, as their maker states them.

The numbers are those of dense products of matrices in bfloat16 (float16 on GPUs without bfloat16) with tensor cores, at
the highest clock, in operations per second. Where a data sheet gives the rate with sparsity, the dense one is half of
it. Utilization is relative to this rate whatever type a model computes in, as is usual.
"""

import torch

# The words in the name of a device, and its rate; the first row whose words are all there counts. The sources are
# NVIDIA's data sheets of these GPUs, and for B200 that of the HGX B200, divided by its eight GPUs.
_RATES: tuple[tuple[tuple[str, ...], float], ...] = (
    (("B200",), 2250e12),
    (("H200", "NVL"), 835.5e12),
    (("H200",), 989.5e12),
    (("H100", "NVL"), 835.5e12),
    (("H100", "PCIe"), 756.5e12),
    (("H100",), 989.5e12),
    (("A100",), 312e12),
    (("V100", "PCIE"), 112e12),
    (("V100",), 125e12),
    (("L40S",), 362.05e12),
    (("L4",), 121e12),
    (("A10",), 125e12),
    (("T4",), 65e12),
)


def peak_flops_of(device: torch.device) -> float | None:
    """The peak rate of `device` in operations per second; None for a CPU and a GPU that is not in the table."""
    return rate_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def rate_of(name: str) -> float | None:
    """The peak rate of the GPU that PyTorch calls `name`, such as ``NVIDIA A100-SXM4-80GB``; None if unknown."""
    words = set(name.replace("-", " ").split())
    return next((rate for parts, rate in _RATES if words.issuperset(parts)), None)
