"""Consecutive steps of a chain, each ``g -> J g + u``, and what they are together."""

from typing import Any

from torch import Tensor

from penstock.arguments import instance

TENSOR = instance(Tensor, "a torch.Tensor", "give one")


class Steps:
    """Consecutive steps, each ``g -> J g + u``. Vectors and matrices are plain or scaled."""

    def __init__(self, matrices: Any, entering: Any) -> None:
        self.matrices, self.entering = matrices, entering

    def __len__(self) -> int:
        return len(self.matrices.values)

    def apply(self, index: int | slice, vectors: Any) -> Any:
        """What the steps at `index` make of `vectors`."""
        found = self.matrices[index].apply(vectors)
        return found if self.entering is None else found + self.entering[index]

    def then(self, later: "Steps") -> "Steps":
        """These steps, each followed by one of `later`."""
        entering = None if self.entering is None else later.matrices.apply(self.entering) + later.entering
        return Steps(later.matrices @ self.matrices, entering)

    def at(self, index: slice) -> "Steps":
        """The steps at `index`, in the same memory."""
        return Steps(self.matrices[index], None if self.entering is None else self.entering[index])

    def product(self) -> "Steps":
        """All of them as one, by products of neighbours."""
        found, rest = self, None
        while (count := len(found)) > 1:
            if count % 2:
                last = found.at(slice(count - 1, None))
                rest = last if rest is None else last.then(rest)
            pairs = count // 2
            found = found.at(slice(0, 2 * pairs, 2)).then(found.at(slice(1, 2 * pairs, 2)))
        return found if rest is None else found.then(rest)
