"""Backpropagation through a chain as a scan over its transposed Jacobians.

The gradients of a chain of n steps are ``g[k - 1] = J[k] g[k] + u[k - 1]``, from ``g[n]`` down to ``g[0]``. ``J[k]`` is
the transposed Jacobian of step k and ``u[k]`` what enters the gradient from elsewhere, such as a loss on the output of
every step. Plain backpropagation takes n steps one after the other. Products of the J are associative, so a scan takes
about ``2 log2(n)`` steps, each with many products at once. Source: Wang, Bai and Pekhimenko, MLSys 2020, algorithm 1.

Laws of this file:
  1. The gradient is a vector at every step. Only products of J with J are products of matrices: those of the up-sweep,
     but for its first step at every level.
  2. No identity is multiplied: there is none.
  3. The order of factors is that of the chain: the paper's operator is ``A (.) B = B A``.
  4. Steps are taken by slices, so that what is read is not copied first, and arguments are never written.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.arguments import check_arguments
from penstock.errors import PenstockError
from penstock.scan.scaled import TENSOR, PlainMatrices, ScaledMatrices, ScaledVectors, Steps


def levels_of(steps: int) -> int:
    """The levels of the up-sweep over `steps` Jacobians: ``ceil(log2(steps + 1)) - 1``."""
    return max(steps.bit_length() - 1, 0)


def blelloch(
    gradient: Tensor, jacobians: Tensor, entering: Tensor | None = None, *, rescale: bool | None = None
) -> Tensor:
    """The gradients at all steps of a chain, by a work-efficient scan of at most ``2 ceil(log2(n + 1)) - 1`` levels.

    Args:
        gradient: at the end of the chain, (B, H).
        jacobians: transposed, from the last step to the first, (n, B, H, H).
        entering: what enters the gradient before each step, in the same order, (n, B, H).
        rescale: True keeps powers of two aside, so that no product overflows. None does so if the result is not finite
            without it.

    Returns:
        (n + 1, B, H): first `gradient`, last the gradient of the input of the chain.

    Raises:
        PenstockError: shapes or types do not fit.
    """
    _check(gradient, jacobians, entering)
    return hybrid(gradient, jacobians, entering, levels=levels_of(len(jacobians)), rescale=rescale)


def linear(gradient: Tensor, jacobians: Tensor, entering: Tensor | None = None) -> Tensor:
    """What `blelloch` returns, step by step: plain backpropagation with the Jacobians."""
    return hybrid(gradient, jacobians, entering, levels=0, rescale=False)


def hybrid(
    gradient: Tensor, jacobians: Tensor, entering: Tensor | None = None, *, levels: int, rescale: bool | None = None
) -> Tensor:
    """What `blelloch` returns. Only the first `levels` of the up-sweep and the last of the down-sweep are a scan.

    In the middle it goes step by step over the products that are there, about ``n / 2 ** levels`` of them. Worth it
    where products become dense (the paper, section 5.3), and where fewer workers than steps are there.
    """
    _check(gradient, jacobians, entering)
    most = levels_of(len(jacobians))
    if not 0 <= levels <= most:
        raise PenstockError(
            f"levels={levels}: expected a number from 0 (step by step) to {most}, the levels of {len(jacobians)} steps"
        )
    return _rescaled(lambda g, j, u: _scan(g, j, u, levels), gradient, jacobians, entering, rescale)


def chunked(
    gradient: Tensor, jacobians: Tensor, entering: Tensor | None = None, *, workers: int, rescale: bool | None = None
) -> Tensor:
    """What `blelloch` returns, in two levels: each of `workers` multiplies the Jacobians of consecutive steps, a scan
    over these products finds the gradient where each one begins, and each goes through its steps.

    It takes ``2 ceil(n / workers)`` steps and those of the scan. All workers take a step at once, as one batched
    product.
    """
    _check(gradient, jacobians, entering)
    if workers < 1:
        raise PenstockError(f"workers={workers}: expected at least 1")
    workers = max(1, min(workers, len(jacobians)))
    return _rescaled(lambda g, j, u: _in_chunks(g, j, u, workers), gradient, jacobians, entering, rescale)


_Method = Callable[[Any, Any, Any], Any]
"""Takes the gradient, the matrices and what enters. Vectors are tensors or `ScaledVectors`."""


def _rescaled(
    method: _Method, gradient: Tensor, jacobians: Tensor, entering: Tensor | None, rescale: bool | None
) -> Tensor:
    if not len(jacobians):
        return gradient.unsqueeze(0)
    if not rescale:
        found: Tensor = method(gradient, PlainMatrices(jacobians), entering)
        if rescale is False or bool(torch.isfinite(found).all()):
            return found
    scaled: ScaledVectors = method(
        ScaledVectors.of(gradient),
        ScaledMatrices.of(jacobians),
        None if entering is None else ScaledVectors.of(entering),
    )
    return scaled.plain()


def _scan(gradient: Any, matrices: Any, entering: Any, levels: int) -> Any:
    steps = Steps(matrices, entering)
    found = _empty(gradient, len(steps) + 1)
    found[0] = gradient
    _fill(found, steps, levels)
    return found


def _fill(found: Any, steps: Steps, levels: int) -> None:
    """Writes the gradients behind each step, ``found[1:]``; ``found[0]`` is known.

    This is algorithm 1 of the paper as a recursion. A level of the up-sweep goes one step, and joins the steps after it
    in pairs. The next level finds the gradients behind the pairs. A level of the down-sweep finds those within them.
    """
    if not levels:
        for place in range(len(steps)):
            found[place + 1] = steps.apply(place, found[place])
        return
    found[1] = steps.apply(0, found[0])
    pairs = (len(steps) - 1) // 2
    if pairs:
        joined = steps.at(slice(1, 2 * pairs, 2)).then(steps.at(slice(2, 2 * pairs + 1, 2)))
        _fill(found[1::2], joined, levels - 1)
    found[2::2] = steps.apply(slice(1, None, 2), found[1 : len(steps) : 2])


def _in_chunks(gradient: Any, matrices: Any, entering: Any, workers: int) -> Any:
    own = Steps(matrices, entering)
    length = -(-len(own) // workers)
    workers = -(-len(own) // length)
    running = gradient[None]
    if workers > 1:
        # The last chunk may be shorter. Its product is not needed.
        whole = (workers - 1) * length
        products = own.at(slice(0, whole, length))
        for place in range(1, length):
            products = products.then(own.at(slice(place, whole, length)))
        running = _scan(gradient, products.matrices, products.entering, levels_of(workers - 1))
    found = _empty(gradient, len(own) + 1)
    found[0] = gradient
    for place in range(length):
        present = slice(place, None, length)
        running = own.apply(present, running[: len(range(len(own))[present])])
        found[place + 1 :: length] = running
    return found


def _empty(like: Any, length: int) -> Any:
    if isinstance(like, ScaledVectors):
        return ScaledVectors(*(each.new_empty(length, *each.shape) for each in (like.values, like.exponents)))
    return like.new_empty(length, *like.shape)


def _check(gradient: Tensor, jacobians: Tensor, entering: Tensor | None) -> None:
    rules = {"gradient": TENSOR, "jacobians": TENSOR, "entering": TENSOR.optional}
    check_arguments("scan", rules, gradient=gradient, jacobians=jacobians, entering=entering)
    batch, width = (*gradient.shape, 0, 0)[:2]
    if gradient.dim() != 2 or jacobians.dim() != 4 or jacobians.shape[1:] != (batch, width, width):
        raise PenstockError(
            "a scan takes a gradient (B, H) and transposed Jacobians (n, B, H, H), found shapes "
            f"{tuple(gradient.shape)} and {tuple(jacobians.shape)}: put the last step first, and give each sample its "
            "own Jacobian"
        )
    if entering is not None and entering.shape != jacobians.shape[:3]:
        raise PenstockError(
            f"entering has shape {tuple(entering.shape)}: expected {tuple(jacobians.shape[:3])}, a gradient (B, H) for "
            "each step, from the last to the first"
        )
    types = {each.dtype for each in (gradient, jacobians, entering) if each is not None}
    if len(types) > 1 or not types <= {torch.float32, torch.float64}:
        raise PenstockError(
            f"a scan computes in float32 or float64, found {', '.join(sorted(map(str, types)))}: convert all of them "
            "to one of these"
        )
