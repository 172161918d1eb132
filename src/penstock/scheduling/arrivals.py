"""Arrivals: receives in the order in which their messages come.

An edge between two ranks is one queue. Where a pipeline turns back, as in `zb-v`, activations of one half and gradients
of the other go the same way, and the ranks may come to them in different orders: what was sent first is not always
used first. Then it is received first and waits on the receiver's side.

Law of this file: a receive is only put further ahead, next to one that waits for a later message of the same queue. So
no rank waits longer than before, and none waits forever that did not before.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from penstock.scheduling.actions import Action, Receive, ReceiveNorms, ReceiveTied, Send, SendNorms, SendTied
from penstock.scheduling.lowering import counterpart, peer, peers
from penstock.scheduling.placements import Placement

__all__ = ["follow_sends", "longest_wait", "sources_of"]


def sources_of(row: Iterable[Action], rank: int, placement: Placement) -> tuple[int, ...]:
    """The ranks that the `row` of `rank` receives from, ascending."""
    receives = (action for action in row if isinstance(action, Receive | ReceiveTied | ReceiveNorms))
    return tuple(sorted({peer(action, rank, placement) for action in receives}))


def longest_wait(row: Sequence[Action]) -> int | None:
    """The place of the receive in `row` that most likely waits longest; None if it has none.

    Who begins with one waits there until the pipe is filled that far, and any other while it runs empty.
    """
    if row and isinstance(row[0], Receive):
        return 0
    return next((place for place in reversed(range(len(row))) if isinstance(row[place], Receive)), None)


def follow_sends(
    row: Iterable[Action], rank: int, placement: Placement, others: Mapping[int, Iterable[Action]]
) -> Iterator[Action]:
    """The `row` of `rank`, with its receives from each of the `others` (their rows, by rank) in the order of the sends.

    A receive without a send stays where it is; the verifier finds it.
    """
    queues = {source: _sent(other, source, rank, placement) for source, other in others.items()}
    early: set[Action] = set()
    for action in row:
        if not isinstance(action, Receive | ReceiveTied | ReceiveNorms):
            yield action
        elif action in early:
            early.remove(action)
        else:
            for message in queues[peer(action, rank, placement)]:
                if message == action:
                    break
                early.add(message)
                yield message
            yield action


def _sent(row: Iterable[Action], source: int, rank: int, placement: Placement) -> Iterator[Action]:
    """The receives, on `rank`, of what the row of `source` sends there."""
    for action in row:
        if isinstance(action, Send | SendTied | SendNorms) and rank in peers(action, source, placement):
            yield counterpart(action)
