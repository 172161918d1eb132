"""Prices of kinds that change over time, as those of spot machines do."""

import csv
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from penstock.errors import PlanError
from penstock.values.documents import read_text


@dataclass(frozen=True, slots=True)
class PriceHistory:
    """The price of one device for an hour, by kind: (seconds, price) from that time on, ascending."""

    changes: Mapping[str, tuple[tuple[float, float], ...]]

    def __post_init__(self) -> None:
        for name, found in self.changes.items():
            times = [seconds for seconds, _ in found]
            if not found or times != sorted(times) or times[0] > 0 or any(price < 0 for _, price in found):
                raise PlanError(
                    f"prices of {name!r}: expected (seconds, price) from second 0 on, ascending, with prices of 0 or "
                    f"more, found {found}: sort them, and begin with a price at 0"
                )

    def at(self, kind: str, seconds: float) -> float | None:
        """The price of `kind` at a time; None if the kind's price never changes."""
        found = self.changes.get(kind)
        return None if found is None else found[bisect_right(found, (seconds, float("inf"))) - 1][1]

    def next_change(self, seconds: float) -> float:
        """The time of the next change of any price, or infinity."""
        later = [time for found in self.changes.values() for time, _ in found if time > seconds]
        return min(later, default=float("inf"))

    @classmethod
    def load(cls, path: str | Path) -> "PriceHistory":
        """Reads a CSV file with the columns seconds, kind and price. `PlanError` names the line that is wrong."""
        changes: dict[str, list[tuple[float, float]]] = {}
        for line, row in enumerate(csv.reader(StringIO(read_text(path, PlanError))), start=1):
            if line == 1 and [cell.strip() for cell in row] == ["seconds", "kind", "price"]:
                continue
            try:
                seconds, kind, price = row
                changes.setdefault(kind.strip(), []).append((float(seconds), float(price)))
            except ValueError:
                raise PlanError(
                    f"{path}: line {line}: expected seconds,kind,price, found {','.join(row)!r}: write two numbers and "
                    "the name of a kind between them"
                ) from None
        return cls({kind: tuple(found) for kind, found in changes.items()})
