"""What a case is: a model, the batches that it takes, and a loss; and how inputs are drawn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capturing.samples import flatten

__all__ = ["LENGTH", "Case", "Draw", "arguments", "integers", "keywords", "loss_of", "normal", "numbers", "ones"]

LENGTH = -1
"""In a shape: the length of the batch. The number of samples comes before the shape."""
Draw = Callable[[int, int], Any]
"""Makes something of a batch for a number of samples and a length."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model that is to be trained by a plain loop and by pipelines."""

    name: str
    family: str
    """The library, or the kind of habit."""
    build: Callable[[], nn.Module]
    """Makes the model; called with seeded generators, once for every training."""
    draw: Draw
    """Makes the inputs for a number of samples of a length: a tuple of arguments or a dict of keywords."""
    lengths: Sequence[int] = (8, 11)
    """The length in the sample, and another one; one number if the model has no free length."""
    microbatches: int = 2
    """How many microbatches a batch is cut into. Random numbers are drawn in a plain loop's order with one only."""
    draws: bool = False
    """Whether the model draws random numbers: then pipelines leave them to PyTorch's own stream."""
    between: Callable[[Any, int], Any] | None = None
    """What the user does with the model before a step, which is given by its number."""
    rebuilds: bool = False
    """Whether the user then makes a new optimizer, and a new pipeline."""
    loss: Callable[[Any, Any], Tensor] = field(default=lambda output, target: loss_of(output))
    float64: bool = True
    samples: int = 2
    """In the sample; 0 dimensions of inputs of another size are no batches."""
    free_batch: bool = True
    """Whether batches have another number of samples than the sample, if the model takes it."""
    imports: Sequence[str] = ()
    """Packages that it needs, where the family does not say so."""


def loss_of(output: Any) -> Tensor:
    """A mean over samples that depends on every output, and in another way on each of its elements."""
    leaves, _ = flatten(output)
    terms = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or not (leaf.requires_grad or len(leaves) == 1):
            continue
        parts = torch.view_as_real(leaf) if leaf.is_complex() else leaf
        parts = parts.reshape(1) if parts.dim() == 0 else parts
        # An average of squares alone would not depend on what is before a normalization.
        wanted = torch.linspace(-1, 1, max(parts[:1].numel(), 1), dtype=parts.dtype, device=parts.device)
        terms.append((parts - wanted[: parts[:1].numel()].reshape(parts[:1].shape)).square().mean())
    return torch.stack([term.double() for term in terms]).sum()


def _of_shape(make: Callable[..., Tensor]) -> Callable[..., Draw]:
    return lambda *shape: lambda samples, length: make(samples, *_sizes(shape, length))


normal = _of_shape(torch.randn)
numbers = _of_shape(torch.rand)
"""Numbers between 0 and 1."""
ones = _of_shape(torch.ones)


def integers(low: int, high: int, *shape: int) -> Draw:
    return lambda samples, length: torch.randint(low, high, (samples, *_sizes(shape, length)))


def arguments(*parts: Draw) -> Draw:
    """The arguments of a model, by position."""
    return lambda samples, length: tuple(part(samples, length) for part in parts)


def keywords(*batches: Draw, **parts: Draw) -> Draw:
    """The arguments of a model by name: those of other batches, and more."""

    def draw(samples: int, length: int) -> dict[str, Any]:
        found = {name: value for batch in batches for name, value in batch(samples, length).items()}
        return found | {name: part(samples, length) for name, part in parts.items()}

    return draw


def _sizes(shape: Sequence[int], length: int) -> list[int]:
    return [length if size == LENGTH else size for size in shape]
