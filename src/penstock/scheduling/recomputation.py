"""Which backwards have something to recompute: those that do not directly follow their forward.

Of a backward in two parts it is the input part that recomputes, or does not; the weight part uses what that kept.

One rule for the simulator, which predicts time and memory, and the worker, which carries it out.
"""

from collections.abc import Iterable
from typing import assert_never

from penstock.scheduling.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Receive,
    ReceiveNorms,
    ReceiveTied,
    Reduce,
    Send,
    SendNorms,
    SendTied,
    Update,
)

__all__ = ["find_direct"]


def find_direct(row: Iterable[Action]) -> frozenset[tuple[int, int]]:
    """The (stage, microbatch) whose backward comes directly after its forward in `row`, messages and sums aside.

    What such a forward computed is still there when it is needed, so that to compute it again would only take time
    (the last stage under 1F1B, for one). A step or a whole program of a schedule comes to the same.
    """
    direct: list[tuple[int, int]] = []
    latest: tuple[int, int] | None = None
    for action in row:
        match action:
            case Forward(stage=stage, microbatch=microbatch):
                latest = stage, microbatch
            case Backward(stage=stage, microbatch=microbatch) | BackwardInput(stage=stage, microbatch=microbatch):
                if latest == (stage, microbatch):
                    direct.append(latest)
                latest = None
            case BackwardWeight() | Update():
                latest = None
            case Send() | Receive() | SendTied() | ReceiveTied() | SendNorms() | ReceiveNorms() | Reduce():
                pass
            case _:
                assert_never(action)
    return frozenset(direct)
