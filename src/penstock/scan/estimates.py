"""Would a scan pay? The predicted time of a backward by each method, and the choice between them.

Scanning replaces n steps by about 2 log2(n), and does about H times the arithmetic: a product of two H x H matrices
where plain backpropagation has a product with a vector. So it pays for long sequences of small hidden states on
machines that multiply many matrices at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import PenstockError
from penstock.scan.counts import Method, count

__all__ = ["MACHINES", "Estimate", "Machine", "estimate", "machine_of"]


@dataclass(frozen=True, slots=True)
class Machine:
    """What a scan's time depends on."""

    call_seconds: float
    """What a batched operation costs, however small."""
    step_seconds: float
    """What a step of PyTorch's own backward of a recurrence costs, however small."""
    flops_per_second: float
    """Of batched products of small matrices."""
    bytes_per_second: float
    """Of operations element by element."""
    matrix_workers: int
    """How many matrices are worth multiplying at once: the chunks of ``chunked``."""


MACHINES: Mapping[str, Machine] = {
    "cpu": Machine(1.2e-5, 2.5e-5, 2.5e9, 4e9, 8),
    # From Wang, Bai and Pekhimenko, table 4 (V100, 16 samples of 1,000 steps with 20 hidden values).
    "cuda": Machine(1e-5, 1.37e-5, 2e11, 5e11, 1024),
}
"""By kind of device. ``method="auto"`` follows these and no measurement, so that all runs choose alike."""
_CALLS_PER_LEVEL = 6
"""Batched operations of a level: copies of the pairs, the product, what enters, and where it is written."""


def machine_of(device: str) -> Machine:
    """The machine that a kind of device stands for; an unknown one counts as a GPU."""
    return MACHINES.get(device, MACHINES["cuda"])


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a backward is predicted to take."""

    seconds: Mapping[str, float]
    """By method."""
    method: Method
    """The fastest."""
    reason: str

    def __str__(self) -> str:
        table = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in self.seconds.items())
        return f"{self.method}: {self.reason} ({table})"


def estimate(steps: int, batch: int, width: int, *, machine: Machine | None = None, device: str = "cpu") -> Estimate:
    """The predicted seconds of a backward through a recurrence of `steps` with `batch` samples and `width` values.

    `machine`: by default that of `device`, see `MACHINES`. Raises `PenstockError` for
    numbers below 1.
    """
    if min(steps, batch, width) < 1:
        raise PenstockError(
            f"steps={steps}, batch={batch}, width={width}: expected whole numbers of at least 1 for each"
        )
    known = machine or machine_of(device)
    size = 4.0 * batch * width
    found: dict[str, float] = {}
    methods: tuple[Method, ...] = ("linear", "blelloch", "chunked")
    for method in methods:
        counts = count(steps, width, method=method, workers=known.matrix_workers)
        work = batch * counts.flops / known.flops_per_second
        if method == "linear":
            # It makes no Jacobians.
            found[method] = steps * known.step_seconds + work
            continue
        matrices = 3 * steps * size * width / known.bytes_per_second
        found[method] = counts.steps * _CALLS_PER_LEVEL * known.call_seconds + matrices + work
    best = min(methods, key=found.__getitem__)
    ratio = found["linear"] / found[best]
    if best == "linear":
        reason = (
            f"products of {width} x {width} matrices would take longer than {steps} steps one after the other: scans "
            "pay for longer sequences or narrower hidden states"
        )
    else:
        reason = f"{count(steps, width, method=best, workers=known.matrix_workers).steps} steps instead of {steps}"
        reason += f", {ratio:.2g} times as fast as step by step"
    return Estimate(found, best, reason)
