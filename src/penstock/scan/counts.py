"""What a scan does: its steps one after the other, its products, and their floating-point operations.

The products are those of the methods in ``scans.py``, counted and not estimated; a test compares both.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

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
