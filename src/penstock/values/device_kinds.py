"""The kinds of devices in a cluster: how fast, how large, and at what price.

A profile is measured on one kind of device. On another kind a layer takes the seconds that were measured there, or, if
there is no such measurement, the seconds of the profile over the kind's speed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from penstock.arguments import TEXT, check_fields, number
from penstock.errors import PlanError
from penstock.values.documents import YamlNode, number_text, quoted_text, read_known
from penstock.values.quantities import LEAST, MOST

_RULES = {
    "name": TEXT.but("give the name of the device, as Profile.device has it"),
    "speed": number(above=LEAST, most=MOST).but("give how many times as fast as the device that was profiled it is"),
    "memory_bytes": number(above=0, most=MOST).but("give the memory of one device in bytes, or leave it out").optional,
    "price_per_hour": number(0, most=MOST).but("give the price of one device for an hour, or leave it out"),
}


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Holds what distinguishes one kind of device from another. `DeviceKind()` is the device that was profiled."""

    name: str = ""
    """The name of the device. A profile whose `device` has this name was measured on it."""
    speed: float = 1.0
    """How many times as fast it is as the profile says: as the one that was measured on this kind, or the first."""
    memory_bytes: float | None = None
    """The memory of one device; None: that of the cluster."""
    price_per_hour: float = 0.0
    """The price of one device for an hour, in any currency; 0 if it is not known."""

    def __post_init__(self) -> None:
        check_fields(self, _RULES, PlanError)


def write_kinds(kinds: Sequence[DeviceKind]) -> list[str]:
    """The lines of a cluster file for `kinds`, one for each row of equal devices."""
    lines = ["kinds: # of the devices, in the order of their ranks"]
    for kind, same in groupby(kinds):
        parts = [f"devices: {len(list(same))}"]
        parts += [f"name: {quoted_text(kind.name)}"] if kind.name else []
        parts += [f"speed: {number_text(kind.speed)}"] if kind.speed != 1 else []
        parts += [f"memory_bytes: {number_text(kind.memory_bytes)}"] if kind.memory_bytes is not None else []
        parts += [f"price_per_hour: {number_text(kind.price_per_hour)}"] if kind.price_per_hour else []
        lines.append(f"- {{{', '.join(parts)}}}")
    return lines


_READERS = {"name": YamlNode.text, **dict.fromkeys(("speed", "memory_bytes", "price_per_hour"), YamlNode.number)}


def read_kinds(place: YamlNode) -> tuple[DeviceKind, ...]:
    """The kind of every device, from the list that `write_kinds` writes."""
    kinds: list[DeviceKind] = []
    for row in place.items():
        places = row.mapping(("devices",), tuple(_READERS))
        count = places["devices"].integer()
        if count < 1:
            places["devices"].fail("1 or more devices", "give how many devices of this kind follow each other")
        known = read_known(places, _READERS)
        kinds += [row.build(lambda known=known: DeviceKind(**known))] * count  # type: ignore[misc]
    return tuple(kinds)
