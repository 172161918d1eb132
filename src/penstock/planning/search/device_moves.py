"""Moves of devices that differ between the stages of a pipeline.

Devices swap their stages, move to another one, are taken in and left out; stages swap their devices, become one, or one
becomes two. Where all devices are equal, their number in each stage says enough (`local_search`).
"""

from collections.abc import Iterator, Sequence
from itertools import combinations

Groups = tuple[tuple[int, ...], ...]
"""The devices of every stage, ascending."""


def moved_devices(groups: Groups, fastest_first: Sequence[int]) -> Iterator[Groups]:
    """The devices of stages after every move. `fastest_first`: all devices of the cluster."""
    stages = list(map(frozenset, groups))
    free = frozenset(fastest_first).difference(*stages)
    for changed in (*_exchanged(stages, free), *_joined(stages), *_divided(stages, free, fastest_first)):
        yield tuple(tuple(sorted(devices)) for devices in changed)


def _exchanged(stages: list[frozenset[int]], free: frozenset[int]) -> Iterator[list[frozenset[int]]]:
    """As many stages on other devices."""

    def changed(*changes: tuple[int, frozenset[int]]) -> list[frozenset[int]]:
        made = stages.copy()
        for index, devices in changes:
            made[index] = devices
        return made

    for a, b in combinations(range(len(stages)), 2):
        one, two = stages[a], stages[b]
        yield changed((a, two), (b, one))
        for x in one:
            for y in two:
                yield changed((a, one - {x} | {y}), (b, two - {y} | {x}))
        for here, there, devices, others in ((a, b, one, two), (b, a, two, one)):
            for x in devices if len(devices) > 1 else ():
                yield changed((here, devices - {x}), (there, others | {x}))
    for index, devices in enumerate(stages):
        for x in devices:
            if len(devices) > 1:
                yield changed((index, devices - {x}))
            for y in free:
                yield changed((index, devices - {x} | {y}))
        for y in free:
            yield changed((index, devices | {y}))


def _joined(stages: list[frozenset[int]]) -> Iterator[list[frozenset[int]]]:
    """Two stages as one, on the devices of both or of either."""
    for index in range(len(stages) - 1):
        one, two = stages[index : index + 2]
        for devices in (one | two, one, two):
            yield [*stages[:index], devices, *stages[index + 2 :]]


def _divided(
    stages: list[frozenset[int]], free: frozenset[int], fastest_first: Sequence[int]
) -> Iterator[list[frozenset[int]]]:
    """One stage as two: on its faster and its slower devices, or on its own and one more."""
    for index, devices in enumerate(stages):
        ranked = [device for device in fastest_first if device in devices]
        counts = {1, len(ranked) // 2, len(ranked) - 1} - {0, len(ranked)}
        halves = [(frozenset(ranked[:count]), frozenset(ranked[count:])) for count in counts]
        for one, two in (*halves, *((devices, frozenset([other])) for other in free)):
            yield [*stages[:index], one, two, *stages[index + 1 :]]
            yield [*stages[:index], two, one, *stages[index + 1 :]]
