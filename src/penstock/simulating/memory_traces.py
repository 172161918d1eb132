"""What a rank holds in memory while a schedule is played.

It follows the runtime: parameters in as many slots as there are versions (an update copies one slot to another and
needs nothing beside them); the optimizer's state; gradients from the end of the first backward that makes them (what
that frees makes room for them) to the end of their update, those of two updates at once where one waits for other
stages; of a microbatch in flight what autograd saves, and what the stage relays without reading it (here a part of
`saved_bytes`), from the start of its forward to the end of its backward; the workspace of a forward or a backward while
it runs, as much as the stage's layers need beyond what is saved anyway; messages from their arrival until
they are used up, that is to the start of the forward (from then on they belong to what is saved) or the end of the
backward, and from when they are made until they have left. What the allocator and the device's runtime take on top is
not in it.

Of a backward in two parts, the input part keeps all this for the weight part: what it could free (what only its own
operators saved) makes room for the gradients of their outputs that the weight part reads. With recomputation it is the
input part that computes again, and all of that is held up to the end of the weight part.

With recomputation a microbatch keeps its stage's input, and all that the stage saves during its backward alone; a
backward that directly follows its forward has nothing to recompute, and keeps everything in between. With tensor
parallelism the numbers are those of each rank of a group, as the profile's are.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.scheduling.placements import Placement, Skip
from penstock.scheduling.schedules import Schedule
from penstock.simulating.costs import Costs
from penstock.simulating.instructions import RECEIVE, SEND, Instructions, Mark, content_stages
from penstock.simulating.player import Track
from penstock.timelines.memories import MemoryCurve, RankMemory

__all__ = ["Sizes", "hold", "peak_bytes"]

_Numbers: TypeAlias = npt.NDArray[np.float64]
_Places: TypeAlias = npt.NDArray[np.intp]
_Changes: TypeAlias = tuple[_Numbers, _Numbers]
"""Moments (seconds, in any order), and how many bytes more or fewer are held from each on."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a microbatch on one replica of every stage.

    `saved`: what autograd saves. `workspace`: what a forward or a backward takes for a moment. `input`, `output`: what
    crosses the cut before and behind the stage, each way, without skips. `parameters`: of its weights, whatever the
    microbatch.
    """

    saved: tuple[float, ...]
    workspace: tuple[float, ...]
    input: tuple[float, ...]
    output: tuple[float, ...]
    parameters: tuple[float, ...]
    recompute: bool
    skips: tuple[tuple[Skip, float], ...] = ()
    """What goes directly between two stages, each way."""

    @classmethod
    def of(cls, costs: Costs, placement: Placement) -> "Sizes":
        """Those of `costs`; a replica that splits microbatches has its share of each."""
        shares = [placement.replicas(stage) if placement.split else 1 for stage in range(len(placement.stages))]
        before = tuple(size / share for size, share in zip((0.0, *costs.cut_bytes), shares, strict=True))
        behind = tuple(size / share for size, share in zip((*costs.cut_bytes, 0.0), shares, strict=True))
        skips = tuple((skip, size / shares[skip[0]]) for skip, size in costs.skips)
        return cls(
            costs.saved_bytes, costs.workspace_bytes, before, behind, costs.parameter_bytes, costs.recompute, skips
        )

    def carried_by(self, instructions: Instructions) -> _Numbers:
        """What each instruction sends, receives or reduces."""
        carried: _Numbers = self.carried()[np.array(instructions.marks, dtype=np.int64)]
        if self.skips:
            kinds, stages = np.array(instructions.kinds), len(self.saved)
            sizes = np.zeros((stages, stages))
            for (here, there), size in self.skips:
                sizes[here, there] = sizes[there, here] = size
            source, target = content_stages(np.array(instructions.contents, dtype=np.int64), stages)
            far = np.abs(source - target) > 1
            places = np.flatnonzero((kinds == SEND) | (kinds == RECEIVE))[far]
            carried[places] = sizes[source[far], target[far]]
        return carried

    def carried(self) -> _Numbers:
        """By mark: what is sent, received or reduced."""
        return self._table(
            {mark: self._message(mark) for mark in Mark if mark.name.startswith(("SEND", "RECEIVE"))}
            | {Mark.REDUCE: self.parameters}
        )

    def _message(self, mark: Mark) -> tuple[float, ...]:
        return self.output if mark in (Mark.SEND_ON, Mark.RECEIVE_BACK) else self.input

    def kept_from_start(self) -> _Numbers:
        """By mark: bytes more from the start of an action on."""
        backward = self.saved if self.recompute else (0.0,) * len(self.saved)
        return self._table(
            {
                Mark.FORWARD: _sums(self._kept(), self.workspace),
                Mark.FORWARD_KEPT: _sums(self._whole(), self.workspace),
                Mark.BACKWARD: _sums(backward, self.workspace),
                Mark.BACKWARD_KEPT: self.workspace,
                Mark.INPUT_PART: _sums(backward, self.workspace),
                Mark.INPUT_PART_KEPT: self.workspace,
                Mark.WEIGHT_PART: self.workspace,
            }
        )

    def dropped_at_stop(self) -> _Numbers:
        """By mark: bytes fewer from the stop of an action on."""
        backward = _sums(self._whole(), self.workspace)
        moment = self.workspace
        return self._table(
            {
                Mark.FORWARD: moment,
                Mark.FORWARD_KEPT: moment,
                Mark.BACKWARD: backward,
                Mark.BACKWARD_KEPT: backward,
                Mark.INPUT_PART: moment,
                Mark.INPUT_PART_KEPT: moment,
                Mark.WEIGHT_PART: backward,
            }
        )

    def _kept(self) -> tuple[float, ...]:
        """Of a microbatch in flight."""
        return self._received() if self.recompute else self.saved

    def _received(self) -> tuple[float, ...]:
        into = [sum(size for (_, there), size in self.skips if there == stage) for stage in range(len(self.saved))]
        return _sums(self.input, tuple(into))

    def _whole(self) -> tuple[float, ...]:
        """Of a microbatch whose backward can begin."""
        return _sums(self.saved, self._received()) if self.recompute else self.saved

    def _table(self, entries: dict[Mark, tuple[float, ...]]) -> _Numbers:
        stages = len(self.saved)
        return np.array([entries.get(mark, (0.0,) * stages) for mark in Mark], dtype=np.float64).ravel()


def hold(track: Track, sizes: Sizes, costs: Costs, schedule: Schedule) -> RankMemory:
    """The memory of the rank of `schedule` that did what `track` says."""
    activations, buffers = _changes(track, sizes, schedule)
    constants = _constants(track, costs, schedule)
    return RankMemory(*constants, activations=_course(activations), buffers=_course(buffers))


def peak_bytes(track: Track, sizes: Sizes, costs: Costs, schedule: Schedule) -> float:
    """``hold(...).peak_bytes``, without the courses."""
    activations, buffers = _changes(track, sizes, schedule)
    both = np.concatenate([activations[0], buffers[0]]), np.concatenate([activations[1], buffers[1]])
    _, held = _totals(both)
    return sum(_constants(track, costs, schedule)) + float(held.max(initial=0.0))


def _constants(track: Track, costs: Costs, schedule: Schedule) -> tuple[float, float, float]:
    """Bytes of all weight versions, of optimizer state and of master weights."""
    stages = schedule.stages_of(track.rank)
    weights = sum(costs.parameter_bytes[stage] for stage in stages)
    return (
        sum(schedule.versions(stage) * costs.parameter_bytes[stage] for stage in stages)
        * costs.assumptions.version_copies,
        costs.assumptions.optimizer_copies * weights,
        costs.assumptions.master_copies * weights,
    )


def _changes(track: Track, sizes: Sizes, schedule: Schedule) -> tuple[_Changes, _Changes]:
    """Of what is kept for backwards, and of messages and gradients."""
    marks = _marks(track)
    starts, stops, messages = np.array(track.starts), np.array(track.stops), np.array(track.messages)
    backward = _is_backward(marks // len(sizes.saved))
    made, gone, sums = _gradients(track, marks, schedule)
    # An update that takes no time ends with the backward before it; what both hold in between is held all the same.
    weights = np.array(sizes.parameters)[marks % len(sizes.saved)]
    ends = stops.copy()
    at_once = (stops[gone] == stops[sums]) & (weights[gone] > 0)
    ends[sums[at_once]] = np.nextafter(stops[gone[at_once]], -np.inf)

    more, fewer = sizes.kept_from_start()[marks], sizes.dropped_at_stop()[marks]
    if not backward.any():  # an evaluation keeps nothing
        more = fewer = np.zeros_like(more)
    kept = _drop_nothing(np.stack([starts, ends], axis=1).ravel(), np.stack([more, -fewer], axis=1).ravel())

    kinds = np.array(track.instructions.kinds)
    carried = sizes.carried_by(track.instructions)
    places = np.flatnonzero((kinds == SEND) | (kinds == RECEIVE))
    # What updates wait for is not counted: a profile knows no ties, and norms are small.
    counted = marks[places] // len(sizes.saved) != Mark.OTHER
    places, messages = places[counted], messages[counted]
    sent = kinds[places] == SEND
    # Sends follow the action that made their messages.
    sends, receives = places[sent], places[~sent]
    computes = np.flatnonzero(marks // len(sizes.saved) <= Mark.WEIGHT_PART)
    makers = computes[np.searchsorted(computes, sends) - 1]
    users = _users(marks, np.array(track.instructions.contents, dtype=np.int64)[counted][~sent], len(sizes.saved))
    used = np.where(backward[users], ends[users], starts[users])
    times = [stops[makers], messages[~sent], messages[sent], used, ends[made], stops[gone]]
    amounts = [carried[sends], carried[receives], -carried[sends], -carried[receives], weights[made], -weights[gone]]
    return kept, _drop_nothing(np.concatenate(times), np.concatenate(amounts))


def _users(marks: npt.NDArray[np.int64], received: npt.NDArray[np.int64], stages: int) -> _Places:
    """The action that uses each message of those that are `received`.

    A stage takes its microbatches in order, and so come the messages from each other stage.
    """
    source, target = content_stages(received, stages)
    users = np.zeros(len(received), dtype=np.intp)
    for here, there in {*zip(source.tolist(), target.tolist(), strict=True)}:
        own = marks % stages == there
        kinds = marks // stages
        taking = own & (_is_forward(kinds) if here < there else _is_backward(kinds))
        members = np.flatnonzero((source == here) & (target == there))
        users[members] = np.flatnonzero(taking)[: len(members)]
    return users


def _gradients(track: Track, marks: npt.NDArray[np.int64], schedule: Schedule) -> tuple[_Places, _Places, _Places]:
    """The backwards that make gradients of weights for another update, the updates that use gradients up, and the last
    backward before each of these."""
    kinds, owners = marks // schedule.stages, marks % schedule.stages
    found: list[tuple[_Places, _Places, _Places]] = []
    for stage in schedule.stages_of(track.rank):
        backwards = np.flatnonzero((owners == stage) & _sums_up(kinds))
        updates = np.flatnonzero((owners == stage) & (kinds == Mark.UPDATE))
        size = schedule.guarantees.microbatches_per_update[stage]
        # Backwards come in the order of their microbatches: where those of each update begin and end.
        ends = _taken(schedule, track.rank, stage, size * np.arange(len(updates) + len(backwards) + 1))
        ends = np.minimum(ends, len(backwards))
        begins, ends = ends[:-1], ends[1:]
        has = np.flatnonzero(ends > begins)
        done = has[has < len(updates)]
        found.append((backwards[begins[has]], updates[done], backwards[ends[done] - 1]))
    made, gone, sums = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return made, gone, sums


def _taken(schedule: Schedule, rank: int, stage: int, microbatches: _Places) -> _Places:
    """How many of so many first microbatches `rank` takes."""
    stride = schedule.placement.stride(stage)
    first = 0 if stride == 1 else schedule.placement.stages[stage].index(rank)
    return (microbatches - first + stride - 1) // stride


def _sums(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(map(sum, zip(one, other, strict=True)))


def _marks(track: Track) -> npt.NDArray[np.int64]:
    return np.array(track.instructions.marks, dtype=np.int64)


def _is_forward(marks: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    return np.isin(marks, (Mark.FORWARD, Mark.FORWARD_KEPT))


def _is_backward(marks: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Whether it uses a gradient up that was received."""
    return np.isin(marks, (Mark.BACKWARD, Mark.BACKWARD_KEPT, Mark.INPUT_PART, Mark.INPUT_PART_KEPT))


def _sums_up(marks: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Whether it ends the backward of a microbatch: its gradients of weights are there then."""
    return np.isin(marks, (Mark.BACKWARD, Mark.BACKWARD_KEPT, Mark.WEIGHT_PART))


def _drop_nothing(times: _Numbers, amounts: _Numbers) -> _Changes:
    changed = amounts != 0
    return times[changed], amounts[changed]


def _totals(changes: _Changes) -> _Changes:
    """Each moment of change once, ascending, and the bytes that are held from it on."""
    order = np.argsort(changes[0], kind="stable")
    times, held = changes[0][order], np.cumsum(changes[1][order])
    last = np.append(times[1:] != times[:-1], np.ones(min(1, len(times)), dtype=bool))
    return times[last], held[last]


def _course(changes: _Changes) -> MemoryCurve:
    times, held = _totals(changes)
    return tuple(zip(times.tolist(), held.tolist(), strict=True))
