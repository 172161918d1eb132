"""The programs of a run that continues another one, without the microbatches that were in flight.

A run of an asynchronous schedule begins with one version of the weights, so its first forwards read version 0 until a
newer one is old enough. A run that goes on where another one was cut has the versions before as well. It reads the
versions that an endless run reads: with stage s at version n of the endless run, version n - i is -i here. Everything
else in its programs is that of a fresh run: the microbatches that were in flight at the cut are computed again.
"""

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
from penstock.scheduling.definitions import Guarantees


def _version_read(guarantees: Guarantees, stage: int, microbatch: int) -> int:
    """The version that `stage` reads for `microbatch` in a run that continues another one; below 0, one of that run."""
    return microbatch // guarantees.microbatches_per_update[stage] - guarantees.delays[stage]


def continued_action(action: Action, guarantees: Guarantees) -> Action:
    """What takes the place of `action` of a fresh run in one that continues another one."""
    match action:
        case Forward(stage, microbatch) | Backward(stage, microbatch):
            return type(action)(stage, microbatch, _version_read(guarantees, stage, microbatch))
        case BackwardInput(stage, microbatch) | BackwardWeight(stage, microbatch):
            return type(action)(stage, microbatch, _version_read(guarantees, stage, microbatch))
        case Update(stage, version):
            return Update(stage, version, version - 1 - guarantees.delays[stage])
        case Send() | Receive() | SendTied() | ReceiveTied() | SendNorms() | ReceiveNorms() | Reduce():
            return action
        case _:
            assert_never(action)
