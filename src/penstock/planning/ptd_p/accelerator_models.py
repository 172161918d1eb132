"""How fast one device runs the operations of a transformer: matrix products, passes over memory, optimizer steps.

The model of matrix products has two constants. A product of (m x k) and (k x n) matrices computes the m n numbers of
its output in tiles, as many at a time as the device has processors; the last wave of tiles is on average half full.
With g numbers in half a wave it takes

    2 m k n / (efficiency peak) (1 + g / (m n))

or the time to move its three matrices through memory, if that is longer. So small outputs (a small microbatch, a large
tensor-parallel size) are slow, and large ones approach `efficiency`.
"""

from dataclasses import dataclass, fields

from penstock.arguments import check_fields, number
from penstock.errors import PlanError

NUMBER_BYTES = 2
"""The size of an activation and of a weight in the precision of the computation."""


@dataclass(frozen=True, slots=True)
class AcceleratorModel:
    """Models one device by its rates per second and the two constants of its matrix products."""

    name: str
    peak_operations: float
    """Matrix operations per second in the precision of the computation, from the data sheet."""
    memory_bandwidth: float
    """Bytes per second."""
    efficiency: float
    """Share of the peak that a very large matrix product reaches, 0 to 1."""
    half_wave: float
    """g: the numbers of the output in half a wave of tiles."""

    def __post_init__(self) -> None:
        rules = dict.fromkeys((field.name for field in fields(self)[1:]), number(above=0))
        rules |= {"efficiency": number(above=0, most=1), "half_wave": number(0)}
        sheet = "measure it, or take it from the maker's data sheet"
        check_fields(self, {name: rule.but(sheet) for name, rule in rules.items()}, PlanError)

    def product_seconds(self, m: float, k: float, n: float, count: float = 1) -> float:
        """Seconds of `count` products of (m x k) and (k x n) in one kernel."""
        computing = 2 * count * m * k * n / (self.efficiency * self.peak_operations)
        moving = count * NUMBER_BYTES * (m * k + k * n + m * n) / self.memory_bandwidth
        return max(computing * (1 + self.half_wave / (count * m * n)), moving)

    def moving_seconds(self, size_bytes: float) -> float:
        """Seconds of kernels that read and write `size_bytes` in all and compute very little."""
        return size_bytes / self.memory_bandwidth


@dataclass(frozen=True, slots=True)
class Precision:
    """Holds the bytes per parameter of mixed precision, in addition to 2 for the weights: 18 in all with Adam."""

    gradient_bytes: float = 4
    """The gradients that microbatches are summed in and that replicas exchange."""
    master_bytes: float = 4
    optimizer_bytes: float = 8

    def __post_init__(self) -> None:
        size = number(0, unit="bytes").but("give the bytes per parameter")
        check_fields(self, {field.name: size for field in fields(self)}, PlanError)

    @property
    def state_bytes(self) -> float:
        """All permanent memory per parameter."""
        return NUMBER_BYTES + self.gradient_bytes + self.master_bytes + self.optimizer_bytes

    @property
    def update_bytes(self) -> float:
        """The bytes that an update moves per parameter: gradients and weights once, the rest in both directions."""
        return self.gradient_bytes + NUMBER_BYTES + 2 * (self.master_bytes + self.optimizer_bytes)


A100 = AcceleratorModel(
    name="NVIDIA A100 80 GB", peak_operations=312e12, memory_bandwidth=2.0e12, efficiency=0.7, half_wave=54 * 128 * 256
)
"""Peak and bandwidth are from NVIDIA's data sheet (312 TFLOP/s in 16 bits; 2.0 TB/s). Half a wave: 108 processors, each
with a tile of 128 x 256. The efficiency is calibrated on one measurement; see docs/trillion.md."""
