"""1F1B with a flush (PipeDream-Flush): after a warm-up forwards and backwards alternate, and one update ends the step.

As fast as GPipe, but stage s keeps at most p - s microbatches in flight instead of m.
Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 3.2.
"""

from collections.abc import Iterator
from typing import assert_never

from penstock.scheduling.actions import Backward, Compute, Forward, Update
from penstock.scheduling.methods import Drain, Method, Part, Promise, Shape, Step, VersionRule

__all__ = ["ONE_F_ONE_B_FLUSH"]


# p = 3, m = 4, first step (p - 1 - s forwards of warm-up at stage s):
#
#   rank 0   F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3 U1
#   rank 1   .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 U1
#   rank 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3 U1
def order(shape: Shape, rank: int, part: Part) -> Iterator[Compute]:
    """The compute actions of `rank` in `part`."""
    warm_up = shape.ranks - 1 - rank
    match part:
        case Step(minibatch):
            first = minibatch * shape.microbatches
            for turn in range(shape.microbatches + warm_up):
                if turn < shape.microbatches:
                    yield Forward(rank, first + turn, minibatch)
                if turn >= warm_up:
                    yield Backward(rank, first + turn - warm_up, minibatch)
            yield Update(rank, minibatch + 1, minibatch)
        case Drain():
            pass
        case _:
            assert_never(part)


def promise(shape: Shape) -> Promise:
    """One version; min(m, p - s) microbatches in flight on stage s."""
    return Promise(
        versions=(1,) * shape.stages,
        in_flight=tuple(min(shape.microbatches, shape.ranks - stage) for stage in range(shape.stages)),
        rule=VersionRule.OWN_MINIBATCH,
        flushes=True,
        microbatches_per_update=shape.microbatches,
    )


ONE_F_ONE_B_FLUSH = Method("1f1b-flush", order, promise)
