"""What a message costs the two ranks that it joins, beside its time on the link.

A rank hands a message over or takes it in, and copies its bytes or lets a thread of the same core do so. It computes
less meanwhile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.arguments import check_fields, number
from penstock.errors import PlanError
from penstock.values.documents import YamlNode, number_text

_HINT = "give what `penstock probe` measures, or leave it out"
_RULES = {"seconds": number(0).but(_HINT), "seconds_per_byte": number(0).but(_HINT)}
COST_KEYS = ("message_seconds", "message_seconds_per_byte")
"""The keys of the two fields in a file of a cluster."""


@dataclass(frozen=True, slots=True)
class MessageCosts:
    """The processor time of a message at each of its ends. Raises `PlanError` for a number that is none."""

    seconds: float = 0.0
    """Of every message: to hand it over, or to take it in."""
    seconds_per_byte: float = 0.0
    """Of each byte: copies, and what the kernel does for a connection between hosts."""

    def __post_init__(self) -> None:
        check_fields(self, _RULES, PlanError, " in the costs of a message")

    def text(self) -> str:
        """The fields that are not zero, as they stand in the line of a level."""
        fields = zip(COST_KEYS, (self.seconds, self.seconds_per_byte), strict=True)
        return "".join(f", {key}: {number_text(value)}" for key, value in fields if value)


FREE = MessageCosts()


def write_costs(rows: Sequence[Sequence[MessageCosts]]) -> list[str]:
    """The lines of a matrix; none if messages cost nothing."""
    lines = []
    for key, values in (
        (COST_KEYS[0], [[cost.seconds for cost in row] for row in rows]),
        (COST_KEYS[1], [[cost.seconds_per_byte for cost in row] for row in rows]),
    ):
        if any(map(any, values)):
            lines.append(f"{key}: # row a, column b: of a message from rank a to rank b, at each end")
            lines += [f"- [{', '.join(map(number_text, row))}]" for row in values]
    return lines


def read_cost(place: YamlNode, places: Mapping[str, YamlNode]) -> MessageCosts:
    """The costs in the line of a level."""
    found = [places[key].number() if key in places else 0.0 for key in COST_KEYS]
    return place.build(lambda: MessageCosts(*found))


def read_costs(place: YamlNode, places: Mapping[str, YamlNode], size: int) -> tuple[tuple[MessageCosts, ...], ...]:
    """The costs beside a matrix of `size` rows; empty if the file has none. One number stands for all links."""
    found = []
    for key in COST_KEYS:
        if key not in places:
            found.append([[0.0] * size] * size)
        elif isinstance(places[key].value, list):
            found.append([list(row.numbers()) for row in places[key].items()])
        else:
            found.append([[places[key].number()] * size] * size)
        if {len(found[-1]), *map(len, found[-1])} != {size}:
            places[key].fail(f"{size} rows of {size} numbers", "give one number for each link, or a single one for all")
    if not places.keys() & set(COST_KEYS):
        return ()
    return place.build(
        lambda: tuple(
            tuple(MessageCosts(*cell) for cell in zip(*rows, strict=True)) for rows in zip(*found, strict=True)
        )
    )
