"""What the layers of a model weigh, and how fast the ranks are that share them."""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.arguments import Entries, check_fields, number
from penstock.errors import PlanError


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Holds a weight for every layer, of which only the ratios count, and a speed for every rank."""

    layers: tuple[float, ...]
    speeds: tuple[float, ...] = ()
    """By rank: how much of the weight it does in a time; empty if all ranks are equal."""

    def __post_init__(self) -> None:
        check_fields(self, {"layers": Entries(number(0)), "speeds": Entries(number(above=0))}, PlanError)

    def __iter__(self) -> Iterator[float]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)
