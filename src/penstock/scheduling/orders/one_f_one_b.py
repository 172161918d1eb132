"""1F1B without a flush (PipeDream): every microbatch has its own update, and no rank ever waits in steady state.

Weight stashing keeps it a true gradient: a microbatch's backward reads the version that its forward read. Plainly that
is the newest version of each stage, so the stages of one microbatch differ in age; with vertical sync all of them read
the version that the input stage read, which costs p versions on every stage.
Source: Narayanan et al., "PipeDream", SOSP 2019, sections 3.2 and 3.3.
"""

from collections.abc import Iterator
from typing import assert_never

from penstock.scheduling.actions import Backward, Compute, Forward, Update
from penstock.scheduling.methods import Drain, Method, Part, Promise, Shape, Step, VersionRule

__all__ = ["ONE_F_ONE_B"]


# p = 3, m = 1: steps 0 to 3 and what is left for the drain. Each B is followed at once by its update. The version that
# F and B read is in brackets, w(s) = p - 1 - s updates behind the microbatch:
#
#   rank 0   F0(0) F1(0) F2(0) B0(0) F3(1) B1(0)  |  B2(0) B3(1)
#   rank 1         F0(0) F1(0) B0(0) F2(1) B1(0) F3(2) B2(1)  |  B3(2)
#   rank 2               F0(0) B0(0) F1(1) B1(1) F2(2) B2(2) F3(3) B3(3)  |
def order(shape: Shape, rank: int, part: Part) -> Iterator[Compute]:
    """The compute actions of `rank` in `part`."""
    warm_up = shape.ranks - 1 - rank
    match part:
        case Step(minibatch):
            for microbatch in shape.microbatches_of(minibatch):
                yield Forward(rank, microbatch, _version(shape, rank, microbatch))
                if microbatch >= warm_up:
                    yield from _backward(shape, rank, microbatch - warm_up)
        case Drain(minibatches):
            admitted = minibatches * shape.microbatches
            for microbatch in range(max(0, admitted - warm_up), admitted):
                yield from _backward(shape, rank, microbatch)
        case _:
            assert_never(part)


def _version(shape: Shape, stage: int, microbatch: int) -> int:
    reader = 0 if shape.vertical_sync else stage
    return max(0, microbatch - (shape.ranks - 1 - reader))


def _backward(shape: Shape, stage: int, microbatch: int) -> Iterator[Compute]:
    version = _version(shape, stage, microbatch)
    yield Backward(stage, microbatch, version)
    yield Update(stage, microbatch + 1, version)


def promise(shape: Shape) -> Promise:
    """p - s microbatches in flight on stage s; as many versions, or p on every stage with vertical sync."""
    in_flight = tuple(shape.ranks - stage for stage in range(shape.stages))
    return Promise(
        versions=(shape.ranks,) * shape.stages if shape.vertical_sync else in_flight,
        in_flight=in_flight,
        rule=VersionRule.INPUT_STAGE if shape.vertical_sync else VersionRule.NEWEST,
        flushes=False,
        microbatches_per_update=1,
    )


ONE_F_ONE_B = Method("1f1b", order, promise, syncs=True)
