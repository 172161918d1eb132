"""What the layers of a model weigh, and how fast the ranks are that share them."""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.arguments import entries, number
from penstock.errors import PlanError


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Holds a weight for every layer, of which only the ratios count, and a speed for every rank."""

    layers: tuple[float, ...]
    speeds: tuple[float, ...] = ()
    """By rank: how much of the weight it does in a time; empty if all ranks are equal."""

    def __post_init__(self) -> None:
        for name, rule in (("layers", number(0)), ("speeds", number(above=0))):
            values = enumerate(entries(name, getattr(self, name), PlanError))
            checked = tuple(rule.check(f"{name}[{index}]", value, PlanError) for index, value in values)
            object.__setattr__(self, name, checked)

    def __iter__(self) -> Iterator[float]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)
