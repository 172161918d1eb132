"""Which backwards recompute: those that do not directly follow their forward.

In a split backward only the input backward recomputes; the weight backward uses what that kept.

The simulator, which predicts time and memory, and the worker, which computes, both use this one rule. Lowering has
the same one.
"""

from collections.abc import Iterable
from typing import assert_never

from penstock.scheduling.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    HostCopy,
    Message,
    Recompute,
    Reduce,
    Update,
    WeightMove,
)


def find_direct(row: Iterable[Action]) -> frozenset[tuple[int, int]]:
    """The pairs (stage, microbatch) whose backward directly follows the forward in `row`; messages and sums aside.

    The activations of such a forward are still in memory, so recomputing them would only cost time. An example is the
    last stage under 1F1B. The steps of a schedule give the same pairs as its whole program.
    """
    direct: list[tuple[int, int]] = []
    latest: tuple[int, int] | None = None
    for action in row:
        # Messages first, since most actions are messages.
        if isinstance(action, Message | Reduce | HostCopy | WeightMove):
            continue
        match action:
            case Forward():
                latest = action.stage, action.microbatch
            case Backward() | BackwardInput():
                if latest == (action.stage, action.microbatch):
                    direct.append(latest)
                latest = None
            case BackwardWeight() | Update() | Recompute():
                latest = None
            case _:
                assert_never(action)
    return frozenset(direct)
