"""A kernel of Triton's, for the measurement of what its first launch waits for."""

import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

__all__ = ["add_one"]


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def add_one(pointer, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds 1 to `count` numbers."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    tl.store(pointer + places, tl.load(pointer + places, mask=inside) + 1, mask=inside)
