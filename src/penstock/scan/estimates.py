"""Would a scan pay? The predicted time of a backward by each method, and the choice between them.

Scanning replaces n steps by about 2 log2(n), and does about H times the arithmetic: a product of two H x H matrices
where plain backpropagation has a product with a vector. So it pays for long sequences of small hidden states on
machines that multiply many matrices at once.

The products are those of the methods in ``scans.py``, counted and not estimated; a test compares both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from penstock.arguments import Rule, check_arguments, integer
from penstock.errors import PenstockError

Method: TypeAlias = Literal["linear", "blelloch", "chunked"]


@dataclass(frozen=True, slots=True)
class ScanCounts:
    """What a scan over the Jacobians of one sample does."""

    steps: int
    """One after the other; the products of a step are independent of each other."""
    matrix_products: int
    vector_products: int
    """Products of a matrix and a vector."""
    critical_flops: int
    """Along the steps: the floating-point operations of one product of each step, the costliest."""
    flops: int
    """Of all products together. A multiplication and an addition are two."""


def count(steps: int, width: int, *, method: Method = "blelloch", workers: int = 1) -> ScanCounts:
    """What `method` does for a chain of `steps` with `width` values in between, without what enters in between.

    `workers`: those of ``chunked``. Raises `PenstockError` for an unknown method or numbers below 1.
    """
    if steps < 1 or width < 1 or workers < 1:
        raise PenstockError(
            f"steps={steps}, width={width}, workers={workers}: expected whole numbers of at least 1 for each"
        )
    matrix, vector = 2 * width**3, 2 * width**2
    match method:
        case "linear":
            return ScanCounts(steps, 0, steps, steps * vector, steps * vector)
        case "blelloch":
            sizes = []
            while steps:
                sizes.append(steps)
                steps = (steps - 1) // 2
            pairs = [(size - 1) // 2 for size in sizes]
            downs = sum(1 for size in sizes if size > 1)
            matrices, vectors = sum(pairs), sum(1 + size // 2 for size in sizes)
            # A level of the up-sweep has products of matrices, unless only its first step is left.
            path = sum(matrix if each else vector for each in pairs) + downs * vector
            return ScanCounts(len(sizes) + downs, matrices, vectors, path, matrices * matrix + vectors * vector)
        case "chunked":
            length = -(-steps // min(workers, steps))
            used = -(-steps // length)
            inner = count(used - 1, width) if used > 1 else ScanCounts(0, 0, 0, 0, 0)
            matrices = (used - 1) * (length - 1) + inner.matrix_products
            vectors = steps + inner.vector_products
            lone = (length - 1) if used > 1 else 0
            return ScanCounts(
                lone + inner.steps + length,
                matrices,
                vectors,
                lone * matrix + inner.critical_flops + length * vector,
                matrices * matrix + vectors * vector,
            )
    raise PenstockError(f"method={method!r}: expected 'linear', 'blelloch' or 'chunked'")


LayerMethod: TypeAlias = Literal["torch", "linear", "blelloch", "chunked"]
GATES: Mapping[str, int] = {"RNN_TANH": 1, "RNN_RELU": 1, "GRU": 3, "LSTM": 4}
"""By the mode of PyTorch's module."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the time of a backward depends on."""

    call_seconds: float
    """What an operation costs, however small."""
    torch_step_seconds: float
    """What a step of PyTorch's own backward of a recurrence costs, however small."""
    torch_gate_seconds: float
    """What each further gate adds to that."""
    torch_lstm_step_seconds: float
    """What a step of an LSTM costs instead: oneDNN has a kernel for it, on CPUs."""
    flops_per_second: float
    """Of products of a batch with the weights."""
    product_seconds: float
    """What each product of a batched product of small matrices costs, however small. Near 0 on a GPU."""
    product_flops_per_second: float
    """Of batched products of small matrices."""
    bytes_per_second: float
    """Of operations element by element."""
    matrix_workers: int
    """How many matrices are worth multiplying at once: the chunks of ``chunked``."""


MACHINES: Mapping[str, Machine] = {
    # Fitted to the backwards of 95 recurrences of 10 to 3,000 steps on one thread of an x86 server.
    "cpu": Machine(
        call_seconds=3.2e-6,
        torch_step_seconds=2.7e-5,
        torch_gate_seconds=2.6e-5,
        torch_lstm_step_seconds=1.2e-6,
        flops_per_second=4e10,
        product_seconds=1.2e-7,
        product_flops_per_second=1.1e11,
        bytes_per_second=2.3e9,
        matrix_workers=64,
    ),
    # Fitted to an NVIDIA H200 in float32, where cuDNN has kernels for all steps; it has none for float64.
    "cuda": Machine(
        call_seconds=1.4e-5,
        torch_step_seconds=7e-7,
        torch_gate_seconds=3.5e-7,
        torch_lstm_step_seconds=1.2e-6,
        flops_per_second=5e12,
        product_seconds=0.0,
        product_flops_per_second=2e12,
        bytes_per_second=2e12,
        matrix_workers=1024,
    ),
}
"""By kind of device. ``method="auto"`` follows these and no measurement, so that all runs choose alike."""
_CALLS_ONCE = 70
"""Operations of a backward of ours that are done once: what the cell prepares, and the gradients of the parameters."""
_CALLS_PER_LEVEL = 12
"""Operations of a level of a scan: slices, the product, what enters, and where it is written."""


def _is_device(name: object) -> bool:
    try:
        return isinstance(name, str) and bool(torch.device(name))
    except RuntimeError:
        return False


_RULES: Mapping[str, Rule[Any]] = {
    **dict.fromkeys(("steps", "batch", "width", "gates"), integer(1)),
    "device": Rule("a type of device of PyTorch's", _is_device, str, "give one such as 'cpu' or 'cuda'"),
}


def machine_of(device: str) -> Machine:
    """The machine that a kind of device stands for; an unknown one counts as a GPU."""
    return MACHINES.get(device, MACHINES["cuda"])


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a backward is predicted to take."""

    seconds: Mapping[LayerMethod, float]
    """By method, as `ScanRNN` takes it."""
    method: LayerMethod
    """The fastest."""
    reason: str

    def __str__(self) -> str:
        table = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in self.seconds.items())
        return f"{self.method}: {self.reason} ({table})"


def estimate(
    steps: int, batch: int, width: int, *, gates: int = 1, machine: Machine | None = None, device: str = "cpu"
) -> Estimate:
    """The predicted seconds of a backward through a recurrence of `steps` with `batch` samples and `width` values.

    `gates`: 1 for `ScanRNN`, 3 for `ScanGRU`, 4 for `ScanLSTM`, which passes on a cell of as many values. `machine`: by
    default that of `device`, see `MACHINES`. Raises `PenstockError` for numbers below 1.
    """
    check_arguments("estimate", _RULES, steps=steps, batch=batch, width=width, gates=gates, device=device)
    known = machine or machine_of(device)
    # The products of all steps with the weights: once for the states, and once for the parameters.
    product = steps * batch * gates * 2 * width**2 / known.flops_per_second
    values = 4.0 * steps * batch * width
    states, torch_step = 1, known.torch_step_seconds + (gates - 1) * known.torch_gate_seconds
    if gates == GATES["LSTM"]:
        states, torch_step = 2, known.torch_lstm_step_seconds
    size = states * width
    own = _CALLS_ONCE * known.call_seconds + product + 8 * gates * values / known.bytes_per_second
    found: dict[LayerMethod, float] = {
        "torch": steps * torch_step + 2 * product,
        "linear": own + steps * (1 + gates) * known.call_seconds + product,
    }
    jacobians = (2 * gates + states**2) * values * width / known.bytes_per_second
    scans: tuple[Literal["blelloch", "chunked"], ...] = ("blelloch", "chunked")
    for method in scans:
        counts = count(steps, size, method=method, workers=known.matrix_workers)
        products = (counts.matrix_products + counts.vector_products) * known.product_seconds
        work = batch * (products + counts.flops / known.product_flops_per_second)
        found[method] = own + jacobians + counts.steps * _CALLS_PER_LEVEL * known.call_seconds + work
    best = min(found, key=found.__getitem__)
    return Estimate(found, best, _reason(best, found, steps, size, known))


def _reason(best: LayerMethod, found: Mapping[LayerMethod, float], steps: int, width: int, machine: Machine) -> str:
    if best in ("blelloch", "chunked"):
        counts = count(steps, width, method=best, workers=machine.matrix_workers)
        least = min(found["torch"], found["linear"])
        return f"{counts.steps} steps instead of {steps}, {least / found[best]:.2g} times as fast as step by step"
    return (
        f"products of {width} x {width} matrices would take longer than {steps} steps one after the other: scans pay "
        "for longer sequences or narrower hidden states"
    )
