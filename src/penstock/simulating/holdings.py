"""What a rank holds in memory while a schedule is played.

It follows the runtime: parameters in as many slots as there are versions (an update copies one slot to another and
needs nothing beside them); gradients and the optimizer's state once; of a microbatch in flight what autograd saves,
from the start of its forward to the end of its backward; messages from their arrival until they are used up, that is
to the start of the forward (from then on they belong to what is saved) or the end of the backward, and until they have
left. What the allocator and the device's runtime take on top is not in it.

With recomputation a microbatch keeps its stage's input, and all that the stage saves during its backward alone; a
backward that directly follows its forward has nothing to recompute, and keeps everything in between. With tensor
parallelism the numbers are those of each rank of a group, as the profile's are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
import numpy.typing as npt

from penstock.scheduling.actions import Action, Backward, Forward, Receive, ReceiveTied, Reduce, Send, SendTied, Update
from penstock.scheduling.placements import Placement
from penstock.simulating.costs import Costs
from penstock.simulating.player import Track
from penstock.values.memories import Course, RankMemory

__all__ = ["Changes", "Sizes", "hold", "peak_bytes", "trace_changes"]


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """At each of `moments` (seconds, in any order) so many `sizes` (bytes) more or fewer are held from then on."""

    moments: list[float]
    sizes: list[float]

    def add(self, moment: float, size: float) -> None:
        """One change."""
        self.moments.append(moment)
        self.sizes.append(size)

    def totals(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """(moments, bytes held from then on), ascending, one of each for every moment of change."""
        moments = np.array(self.moments)
        order = np.argsort(moments, kind="stable")
        moments = moments[order]
        last = np.append(moments[1:] != moments[:-1], np.ones(min(1, len(moments)), dtype=bool))
        held = np.cumsum(np.array(self.sizes)[order])
        return moments[last], held[last]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a microbatch on one replica of every stage.

    `saved`: what autograd saves. `input`, `output`: what crosses the cut before and behind the stage, each way.
    `parameters`: of its weights, whatever the microbatch.
    """

    saved: tuple[float, ...]
    input: tuple[float, ...]
    output: tuple[float, ...]
    parameters: tuple[float, ...]
    recompute: bool

    @classmethod
    def of(cls, costs: Costs, placement: Placement) -> "Sizes":
        """Those of `costs`; a replica that splits microbatches has its share of each."""
        shares = [placement.replicas(stage) if placement.split else 1 for stage in range(len(placement.stages))]
        before = tuple(size / share for size, share in zip((0.0, *costs.cut_bytes), shares, strict=True))
        behind = tuple(size / share for size, share in zip((*costs.cut_bytes, 0.0), shares, strict=True))
        return cls(costs.saved_bytes, before, behind, costs.parameter_bytes, costs.recompute)


def hold(
    row: Sequence[Action],
    track: Track,
    sizes: Sizes,
    costs: Costs,
    stages: Sequence[int],
    versions: Callable[[int], int],
) -> RankMemory:
    """The memory of a rank that holds `stages`, in `versions` each, and has done `row` at the times of `track`."""
    activations, buffers = trace_changes(row, track, sizes)
    constants = _constants(row, costs, stages, versions)
    return RankMemory(*constants, activations=_course(activations), buffers=_course(buffers))


def peak_bytes(
    row: Sequence[Action],
    track: Track,
    sizes: Sizes,
    costs: Costs,
    stages: Sequence[int],
    versions: Callable[[int], int],
) -> float:
    """``hold(...).peak_bytes``, without the courses."""
    activations, buffers = trace_changes(row, track, sizes)
    both = Changes(activations.moments + buffers.moments, activations.sizes + buffers.sizes)
    _, held = both.totals()
    return sum(_constants(row, costs, stages, versions)) + float(held.max(initial=0.0))


def _constants(
    row: Sequence[Action], costs: Costs, stages: Sequence[int], versions: Callable[[int], int]
) -> tuple[float, float, float, float]:
    """Bytes of all weight versions, of gradients, optimizer state and master weights."""
    weights = sum(costs.parameter_bytes[stage] for stage in stages)
    trains = any(isinstance(action, Backward) for action in row)
    return (
        sum(versions(stage) * costs.parameter_bytes[stage] for stage in stages),
        weights if trains else 0.0,
        costs.assumptions.optimizer_copies * weights,
        costs.assumptions.master_copies * weights,
    )


def trace_changes(row: Sequence[Action], track: Track, sizes: Sizes) -> tuple[Changes, Changes]:
    """Of what is kept for backwards, and of messages. A message changes the bytes held when it comes or goes."""
    saved, inputs, outputs, recompute = sizes.saved, sizes.input, sizes.output, sizes.recompute
    trains = any(isinstance(action, Backward) for action in row)
    kept, buffers = Changes([], []), Changes([], [])
    keep, put = kept.add, buffers.add
    messages = iter(track.messages)
    coming = 0.0  # bytes received for the next forward or backward
    latest: tuple[int, int, float] = (-1, -1, 0.0)
    done = 0.0
    for action, start, stop in zip(row, track.starts, track.stops, strict=True):
        match action:
            case Forward(stage=stage, microbatch=number):
                if coming:
                    put(start, -coming)
                    coming = 0.0
                if trains:
                    keep(start, inputs[stage] if recompute else saved[stage])
                latest, done = (stage, number, start), stop
            case Backward(stage=stage, microbatch=number):
                if recompute:
                    direct = latest[:2] == (stage, number)
                    keep(latest[2] if direct else start, saved[stage])
                    keep(stop, -saved[stage] - inputs[stage])
                else:
                    keep(stop, -saved[stage])
                if coming:
                    put(stop, -coming)
                    coming = 0.0
                latest, done = (-1, -1, 0.0), stop
            case Send(stage=stage, target=target):
                left = next(messages)
                size = outputs[stage] if target > stage else inputs[stage]
                if size:
                    put(done, size)
                    put(left, -size)
            case Receive(stage=stage, source=source):
                size = inputs[stage] if source < stage else outputs[stage]
                arrival = next(messages)
                if size:
                    put(arrival, size)
                    coming += size
            case SendTied() | ReceiveTied():
                next(messages)
            case Update() | Reduce():
                latest = (-1, -1, 0.0)
            case _:
                assert_never(action)
    return kept, buffers


def _course(changes: Changes) -> Course:
    moments, held = changes.totals()
    return tuple(zip(moments.tolist(), held.tolist(), strict=True))
