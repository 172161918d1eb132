"""Puts meetings in rounds, in each of which everybody is in one meeting at most."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

__all__ = ["arrange"]

T = TypeVar("T")


def arrange(meetings: Iterable[T], members: Callable[[T], Iterable[Hashable]]) -> list[list[T]]:
    """`meetings` in rounds, where nobody is in two meetings of a round. Each goes to the first round in which all of
    its `members` are free.

    Whoever attends the meetings round by round waits for nobody who waits for him.
    """
    rounds: list[list[T]] = []
    busy: defaultdict[Hashable, set[int]] = defaultdict(set)
    for meeting in meetings:
        taken = set[int]().union(*(busy[member] for member in members(meeting)))
        chosen = next(number for number in range(len(taken) + 1) if number not in taken)
        for member in members(meeting):
            busy[member].add(chosen)
        rounds.extend([] for _ in range(chosen + 1 - len(rounds)))
        rounds[chosen].append(meeting)
    return rounds
