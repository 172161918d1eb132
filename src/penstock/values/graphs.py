r"""A model as a graph of operators, and the chain that is made of it.

Stages hold consecutive layers, so a graph with branches must become a chain. The prefixes of such a chain are down-sets
of the graph (with every operator, all that it depends on); each is given by its maximal operators, which form an
antichain: the states that PipeDream's optimizer works on. A down-set is a possible cut, and what crosses it are the
tensors that were made inside and are read outside, each once.

The rule, since many chains exist: of all orders in which the operators can run, take one whose cuts have the smallest
total of crossing bytes. It is a shortest path through the down-sets, from the empty one to the whole graph, one
operator at a time:

        b          {} -> {a} -> {a,b} -> {a,b,c} -> {a,b,c,d}
      /   \                  \                  /
    a       d                 -> {a,c} ---------
      \   /
        c          the cut {a} is crossed by a's output once, although b and c both read it
"""

from dataclasses import dataclass
from heapq import nsmallest

__all__ = ["Graph", "Operator", "Tensor", "linearise"]

_WIDTH = 4096
"""Down-sets of one size that the search keeps: it is exact up to here, and a beam search for wider graphs."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One node: times in seconds, weights in bytes."""

    name: str
    forward_seconds: float
    backward_seconds: float
    parameter_bytes: float
    output_bytes: float
    """All that it makes, read or not."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """What operator `producer` makes and the operators `readers` read (indices into `Graph.operators`)."""

    producer: int
    bytes: float
    readers: tuple[int, ...]
    output: bool = False
    """Whether it belongs to the model's output, and so crosses every later cut."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Operators and the tensors between them; no tensor is read by its producer or by what that depends on."""

    operators: tuple[Operator, ...]
    tensors: tuple[Tensor, ...]

    def predecessors(self) -> list[int]:
        """For every operator, a bit mask of those whose tensors it reads."""
        masks = [0] * len(self.operators)
        for tensor in self.tensors:
            for reader in tensor.readers:
                masks[reader] |= 1 << tensor.producer
        return masks

    def crossing_bytes(self, inside: int) -> float:
        """Bytes that cross the cut around the down-set `inside` (a bit mask): each tensor once."""
        return sum(
            tensor.bytes
            for tensor in self.tensors
            if inside >> tensor.producer & 1
            and (tensor.output or any(not inside >> reader & 1 for reader in tensor.readers))
        )


def linearise(graph: Graph) -> tuple[tuple[int, float], ...]:
    """The operators in the order of the chain, each with the bytes that cross the cut after it.

    The order has the smallest total of crossing bytes; of equals, the first that a search finds which tries the
    operators in their order. The cut after the last operator is crossed by the model's output. Raises ValueError if the
    graph has a cycle.
    """
    predecessors = graph.predecessors()
    crossing: dict[int, float] = {0: 0}
    level: dict[int, float] = {0: 0}
    came_from: list[dict[int, int]] = []
    for _ in graph.operators:
        totals: dict[int, float] = {}
        steps: dict[int, int] = {}
        for inside, total in level.items():
            for operator in _ready(inside, predecessors):
                grown = inside | 1 << operator
                if grown not in crossing:
                    crossing[grown] = graph.crossing_bytes(grown)
                if grown not in totals or total + crossing[grown] < totals[grown]:
                    totals[grown], steps[grown] = total + crossing[grown], operator
        if not totals:
            raise ValueError("the graph has a cycle")
        level = totals if len(totals) <= _WIDTH else dict(nsmallest(_WIDTH, totals.items(), key=lambda item: item[1]))
        came_from.append(steps)
    order: list[tuple[int, float]] = []
    inside = (1 << len(graph.operators)) - 1
    for steps in reversed(came_from):
        order.append((steps[inside], crossing[inside]))
        inside ^= 1 << steps[inside]
    return tuple(reversed(order))


def _ready(inside: int, predecessors: list[int]) -> list[int]:
    """The operators outside `inside` whose predecessors are all inside."""
    return [operator for operator, mask in enumerate(predecessors) if not inside >> operator & 1 and not mask & ~inside]
