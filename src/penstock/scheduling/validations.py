"""What ranks do where a validation takes an update back.

All ranks learn the same from the norms of all stages, each at its own validation. What a rank has forwarded by then
read weights that are taken back. So it receives what other ranks have sent it by their validations, drops all of it
with its own forwards, and runs these again. The verifier proves these programs, too.
"""

from collections.abc import Mapping, Sequence

from penstock.scheduling.actions import Action, Receive, ReceiveNorms, Send, SendNorms, Validate
from penstock.scheduling.lowering import counterpart, peers
from penstock.scheduling.placements import Placement


def begun_by(row: Sequence[Action]) -> tuple[Action, ...]:
    """The actions of a step, the `row` of a rank, up to its validation; none without one."""
    return tuple(row[: max((place + 1 for place, each in enumerate(row) if isinstance(each, Validate)), default=0)])


def taken_back(begun: Mapping[int, Sequence[Action]], rank: int, placement: Placement) -> tuple[Action, ...]:
    """What `rank` receives, and drops, when its validation has taken an update back. `begun`: `begun_by`, by rank."""
    sent = (
        counterpart(action)
        for source, row in begun.items()
        for action in row
        if isinstance(action, Send) and rank in peers(action, source, placement)
    )
    received = {action for action in begun[rank] if isinstance(action, Receive)}
    return tuple(action for action in dict.fromkeys(sent) if action not in received)


def repeated(begun: Sequence[Action]) -> tuple[Action, ...]:
    """What a rank runs again of what it had `begun`: all but the exchange of norms."""
    return tuple(action for action in begun if not isinstance(action, SendNorms | ReceiveNorms | Validate))
