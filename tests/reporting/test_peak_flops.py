"""The table of peak rates, by the names that PyTorch gives to devices."""

import pytest
import torch

from penstock.reporting.stats import peak_flops_of, rate_of


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-PCIE-32GB", 112),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362.05),
        ("Tesla T4", 65),
        ("NVIDIA A10", 125),
    ],
)
def test_names_of_devices(name: str, tera: float) -> None:
    assert rate_of(name) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize("name", ["NVIDIA A10G", "NVIDIA L40", "NVIDIA T400", "a GPU of another maker", ""])
def test_other_devices_are_unknown(name: str) -> None:
    assert rate_of(name) is None


def test_a_cpu_has_no_peak() -> None:
    assert peak_flops_of(torch.device("cpu")) is None
