"""Arrivals: puts receives in the order in which their messages arrive.

The messages from one rank to another form one queue. In a V, as in `zb-v`, activations of one half of the stages and
gradients of the other half share a queue, and the message that is sent first is not always used first. Then it is
received first all the same, and the receiver keeps it until its use.

Rule of this file: a receive only moves ahead, directly before a receive of a later message in the same queue. So no
rank waits longer than before, and no deadlock is added.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from penstock.scheduling.actions import Action, Receive, Receiving, Sending
from penstock.scheduling.lowering import counterpart, peer, peers
from penstock.scheduling.placements import Placement


def sources_of(row: Iterable[Action], rank: int, placement: Placement) -> tuple[int, ...]:
    """The ranks that the `row` of `rank` receives from, ascending."""
    receives = (action for action in row if isinstance(action, Receiving))
    return tuple(sorted({peer(action, rank, placement) for action in receives}))


def longest_wait(row: Sequence[Action]) -> int | None:
    """The index of the receive in `row` that most likely waits longest; None if there is no receive.

    A rank that begins with a receive waits there while the pipe fills; any other rank waits at its last receive, while
    the pipe drains.
    """
    if row and isinstance(row[0], Receive):
        return 0
    return next((place for place in reversed(range(len(row))) if isinstance(row[place], Receive)), None)


def follow_sends(
    row: Iterable[Action], rank: int, placement: Placement, others: Mapping[int, Iterable[Action]]
) -> Iterator[Action]:
    """The `row` of `rank`, with its receives from each rank of `others` in the order of the sends.

    `others` has rows by rank. A receive without a send stays where it is; the verifier finds it.
    """
    queues = {source: _sent(other, source, rank, placement) for source, other in others.items()}
    early: set[Action] = set()
    for action in row:
        if not isinstance(action, Receiving):
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
    """The receives on `rank` of the messages that the row of `source` sends to it."""
    for action in row:
        if isinstance(action, Sending) and rank in peers(action, source, placement):
            yield counterpart(action)
