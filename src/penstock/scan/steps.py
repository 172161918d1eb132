"""Consecutive steps of a chain, each ``g -> J g + u``, and what they are together."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["Steps"]


class Steps:
    """Consecutive steps, each ``g -> J g + u``. Vectors and matrices are plain or scaled."""

    def __init__(self, matrices: Any, entering: Any) -> None:
        self.matrices, self.entering = matrices, entering

    def apply(self, index: Any, vectors: Any) -> Any:
        """What the steps at `index` make of `vectors`."""
        found = self.matrices[index].apply(vectors)
        return found if self.entering is None else found + self.entering[index]

    def then(self, later: "Steps") -> "Steps":
        """These steps, each followed by one of `later`."""
        entering = None if self.entering is None else later.matrices.apply(self.entering) + later.entering
        return Steps(later.matrices @ self.matrices, entering)

    def put(self, index: Any, steps: "Steps") -> None:
        """Replaces the steps at `index`."""
        self.matrices[index] = steps.matrices
        if self.entering is not None:
            self.entering[index] = steps.entering

    def at(self, index: Tensor) -> "Steps":
        """A copy of the steps at `index`."""
        return Steps(self.matrices[index], None if self.entering is None else self.entering[index])

    def product(self) -> "Steps":
        """All of them as one, by products of neighbours."""
        count = len(self.matrices.values)
        device = self.matrices.values.device
        found = self.at(torch.arange(count, device=device))
        while count > 1:
            pairs = torch.arange(0, count - 1, 2, device=device)
            joined = found.at(pairs).then(found.at(pairs + 1))
            last = found.at(torch.tensor([count - 1], device=device))
            found.put(torch.arange(len(pairs), device=device), joined)
            # A last one without a neighbour stays as it is.
            if count % 2:
                found.put(torch.tensor([len(pairs)], device=device), last)
            count = -(-count // 2)
        return found.at(torch.tensor([0], device=device))
