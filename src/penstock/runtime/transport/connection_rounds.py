"""Arranges connections in rounds, so that each process makes at most one connection in each round."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T")


def arrange(connections: Iterable[T], members: Callable[[T], Iterable[Hashable]]) -> list[list[T]]:
    """Arranges `connections` in rounds, in none of which two connections share a member. Each connection goes to the
    first round in which all of its `members` are free.

    Processes that make their connections round by round cannot wait for each other in a circle.
    """
    rounds: list[list[T]] = []
    busy: defaultdict[Hashable, set[int]] = defaultdict(set)
    for connection in connections:
        taken = set[int]().union(*(busy[member] for member in members(connection)))
        chosen = next(number for number in range(len(taken) + 1) if number not in taken)
        for member in members(connection):
            busy[member].add(chosen)
        rounds.extend([] for _ in range(chosen + 1 - len(rounds)))
        rounds[chosen].append(connection)
    return rounds
