"""The memory of a rank during the simulation of a schedule.

It follows the runtime. A rank holds:

- trained parameters, one slot per version (an update copies one slot to another and needs nothing else);
- frozen parameters, with their scales, and buffers, once;
- the optimizer's state, or its share of it, where replicas share it;
- what libraries keep, as the profile measured it;
- gradients, from the end of the first backward that produces them (what that backward frees makes room for them) to
  the end of their update; those of two updates at once where one update waits for other stages;
- of a streamed stage neither weights nor state, but from a fetch to the release, whenever their copies begin, the
  weights with what is not trained; and gradients from the end of the visit's first backward, or from a fetch that
  brings them back, until a release has moved them. The parts of an update, which come when nothing else of the stages
  is there, are not counted;
- what autograd saves for a microbatch in flight, and what the stage relays without reading it (here included in
  `saved_bytes`), from the start of its forward to the end of its backward;
- the workspace of a forward or backward while it runs: what the stage's layers need beyond what is saved anyway;
- messages, from their production until they have left, and from their arrival to the start of the forward (from then
  on they count as saved) or to the end of the backward that uses them.

The overhead of the allocator is not included.

An input backward keeps all this for the weight backward: what it could free (what only its own operators saved) makes
room for the gradients of their outputs, which the weight backward reads. With recomputation the input backward
recomputes, and all of that is held until the end of the weight backward.

An offload frees what it moves when what waits for its copy begins, its reload at the latest, and a reload takes as much
from its start on. What the stage received stays.

With recomputation a microbatch keeps its stage's input, and everything that the stage saves only from its recomputation
on. A backward that directly follows its forward recomputes nothing, and keeps everything in between. With tensor
parallelism the numbers are those of each rank of a group, as in the profile.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.scheduling.placements import Placement, Skip
from penstock.scheduling.schedules import Schedule
from penstock.simulating.action_costs import Costs
from penstock.simulating.event_simulation import Track
from penstock.simulating.instructions import AWAITING_COMPUTE, RECEIVE, SEND, Instructions, MemoryEffect, content_stages
from penstock.timelines.memories import MemoryCurve, RankMemory

_Numbers: TypeAlias = npt.NDArray[np.float64]
_Places: TypeAlias = npt.NDArray[np.intp]
_Changes: TypeAlias = tuple[_Numbers, _Numbers]
"""Times (seconds, in any order), and how many bytes more or fewer are held from each on."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes per microbatch on one replica of every stage.

    `saved` is what autograd saves, `workspace` what a forward or backward takes temporarily; `input` and `output` cross
    the cuts before and behind the stage, each way, without skips. `parameters` is the size of its weights.
    """

    saved: tuple[float, ...]
    workspace: tuple[float, ...]
    input: tuple[float, ...]
    output: tuple[float, ...]
    parameters: tuple[float, ...]
    recomputed: frozenset[int]
    offloaded: tuple[float, ...]
    """What an offload moves of `saved`."""
    weights: tuple[float, ...]
    """What a fetch brings of a streamed stage, without gradients."""
    skips: tuple[tuple[Skip, float], ...] = ()
    """The bytes that are sent directly between two stages, each way."""

    @classmethod
    def of(cls, costs: Costs, placement: Placement) -> "Sizes":
        """The sizes in `costs`; a replica that splits microbatches has its share of each."""
        shares = [placement.replicas(stage) if placement.split else 1 for stage in range(len(placement.stages))]
        before = tuple(size / share for size, share in zip((0.0, *costs.cut_bytes), shares, strict=True))
        behind = tuple(size / share for size, share in zip((*costs.cut_bytes, 0.0), shares, strict=True))
        skips = tuple((skip, size / shares[skip[0]]) for skip, size in costs.skips)
        return cls(
            *(costs.saved_bytes, costs.workspace_bytes, before, behind, costs.parameter_bytes, costs.recomputed),
            costs.offloaded_bytes,
            costs.weight_bytes,
            skips,
        )

    def message_bytes(self, instructions: Instructions) -> _Numbers:
        """The bytes that each instruction sends, receives or reduces."""
        behind = dict.fromkeys((MemoryEffect.SEND_ACTIVATION, MemoryEffect.RECEIVE_GRADIENT), self.output)
        before = dict.fromkeys((MemoryEffect.SEND_GRADIENT, MemoryEffect.RECEIVE_ACTIVATION), self.input)
        by_effect = self._table({**behind, **before, MemoryEffect.REDUCE: self.parameters})
        passed: _Numbers = by_effect[np.array(instructions.effects, dtype=np.int64)]
        if self.skips:
            kinds, stages = np.array(instructions.kinds), len(self.saved)
            sizes = np.zeros((stages, stages))
            for (here, there), size in self.skips:
                sizes[here, there] = sizes[there, here] = size
            source, target = content_stages(np.array(instructions.contents, dtype=np.int64), stages)
            far = np.abs(source - target) > 1
            transfers = np.flatnonzero((kinds == SEND) | (kinds == RECEIVE))[far]
            passed[transfers] = sizes[source[far], target[far]]
        return passed

    def held(self) -> tuple[_Numbers, _Numbers]:
        """By effect: how many bytes more are held from the start of an action on, and how many fewer from its stop."""
        direct = [sum(size for (_, there), size in self.skips if there == stage) for stage in range(len(self.saved))]
        # What a microbatch keeps in flight, and when its backward can start.
        none = (0.0,) * len(self.saved)
        again = tuple(size if stage in self.recomputed else 0.0 for stage, size in enumerate(self.saved))
        inputs = enumerate(_sums(self.input, tuple(direct)))
        kept = tuple(size if stage in self.recomputed else self.saved[stage] for stage, size in inputs)
        whole, work = _sums(again, kept), self.workspace
        recomputed = _sums(again, work)
        changes = {
            MemoryEffect.FORWARD: (_sums(kept, work), work),
            MemoryEffect.FORWARD_KEPT: (_sums(whole, work), work),
            MemoryEffect.BACKWARD: (recomputed, _sums(whole, work)),
            MemoryEffect.BACKWARD_KEPT: (work, _sums(whole, work)),
            MemoryEffect.BACKWARD_INPUT: (recomputed, work),
            MemoryEffect.BACKWARD_INPUT_KEPT: (work, work),
            MemoryEffect.BACKWARD_WEIGHT: (work, _sums(whole, work)),
            MemoryEffect.RECOMPUTE: (recomputed, work),
            MemoryEffect.OFFLOAD: (none, self.offloaded),
            MemoryEffect.RELOAD: (self.offloaded, none),
        }
        more = self._table({effect: begun for effect, (begun, _) in changes.items()})
        return more, self._table({effect: ended for effect, (_, ended) in changes.items()})

    def _table(self, entries: dict[MemoryEffect, tuple[float, ...]]) -> _Numbers:
        stages = len(self.saved)
        return np.array([entries.get(effect, (0.0,) * stages) for effect in MemoryEffect], dtype=np.float64).ravel()


def trace_memory(track: Track, sizes: Sizes, costs: Costs, schedule: Schedule) -> RankMemory:
    """The memory of the rank of `schedule` that `track` simulated."""
    activations, buffers = _changes(track, sizes, schedule)
    constants = _constants(track, costs, schedule)
    return RankMemory(*constants, _curve(activations), _curve(buffers), costs.library_bytes)


def peak_bytes(track: Track, sizes: Sizes, costs: Costs, schedule: Schedule) -> float:
    """``trace_memory(...).peak_bytes``, without building the curves."""
    activations, buffers = _changes(track, sizes, schedule)
    both = np.concatenate([activations[0], buffers[0]]), np.concatenate([activations[1], buffers[1]])
    _, held = _totals(both)
    return sum(_constants(track, costs, schedule)) + costs.library_bytes + float(held.max(initial=0.0))


def _constants(track: Track, costs: Costs, schedule: Schedule) -> tuple[float, float, float]:
    """The bytes of all weight versions, of the optimizer's state and of the master weights that are not on the host."""
    stages = [stage for stage in schedule.stages_of(track.rank) if stage not in schedule.streamed]
    assumed = costs.assumptions
    weights = sum(costs.parameter_bytes[stage] for stage in stages)
    versions = sum(schedule.versions(stage) * costs.parameter_bytes[stage] for stage in stages)
    frozen = sum(costs.frozen_bytes[stage] for stage in stages)
    sharers = [schedule.placement.replicas(stage) if assumed.shard_optimizer else 1 for stage in stages]
    stepped = sum(costs.parameter_bytes[stage] / count for stage, count in zip(stages, sharers, strict=True))
    return (
        (weights if assumed.state_on_host else versions) * assumed.version_copies + frozen,
        # What streams has all state on the host.
        0.0 if schedule.streamed else assumed.kept_copies * stepped,
        assumed.master_copies * weights,
    )


def _changes(track: Track, sizes: Sizes, schedule: Schedule) -> tuple[_Changes, _Changes]:
    """The changes of what is kept for backwards, and of messages and gradients."""
    effects = np.array(track.instructions.effects, dtype=np.int64)
    starts, stops, messages = np.array(track.starts), np.array(track.stops), np.array(track.messages)
    backward = _is_backward(effects // len(sizes.saved))
    first_backwards, updates, last_backwards = _gradients(track, effects, schedule)
    # An update that takes no time ends with the backward before it: free what the backward holds just before that.
    weights = np.array(sizes.parameters)[effects % len(sizes.saved)]
    freed = stops.copy()
    instant = (stops[updates] == stops[last_backwards]) & (weights[updates] > 0)
    freed[last_backwards[instant]] = np.nextafter(stops[updates[instant]], -np.inf)
    kinds, details = np.array(track.instructions.kinds), track.instructions.details
    waiting = np.flatnonzero(kinds == AWAITING_COMPUTE).tolist()
    ends = {key: starts[index] for index in waiting for key in details[index][1]}
    # A reload begins when the copy to the host has ended, and its memory is free.
    for index in np.flatnonzero(effects // len(sizes.saved) == MemoryEffect.RELOAD).tolist():
        key = (*details[index].key[:2], True)
        ends[key] = min(ends.get(key, starts[index]), starts[index])
    for index in np.flatnonzero(effects // len(sizes.saved) == MemoryEffect.OFFLOAD).tolist():
        freed[index] = ends.get(details[index].key, stops[index])

    more, fewer = (held[effects] for held in sizes.held())
    if not backward.any():  # an evaluation keeps nothing
        more = fewer = np.zeros_like(more)
    kept = _without_zeros(np.stack([starts, freed], axis=1).ravel(), np.stack([more, -fewer], axis=1).ravel())

    passed = sizes.message_bytes(track.instructions)
    transfers = np.flatnonzero((kinds == SEND) | (kinds == RECEIVE))
    # Messages that updates wait for are not counted: a profile has no tied weights, and norms are small.
    counted = effects[transfers] // len(sizes.saved) != MemoryEffect.OTHER
    transfers, messages = transfers[counted], messages[counted]
    sent = kinds[transfers] == SEND
    # Sends follow the action that produced their messages.
    sends, receives = transfers[sent], transfers[~sent]
    computes = np.flatnonzero(effects // len(sizes.saved) <= MemoryEffect.BACKWARD_WEIGHT)
    makers = computes[np.searchsorted(computes, sends) - 1]
    users = _users(effects, np.array(track.instructions.contents, dtype=np.int64)[counted][~sent], len(sizes.saved))
    used = np.where(backward[users], freed[users], starts[users])
    times = [stops[makers], messages[~sent], messages[sent], used, freed[first_backwards], stops[updates]]
    amounts = [passed[sends], passed[receives], -passed[sends], -passed[receives]]
    amounts += [weights[first_backwards], -weights[updates]]
    if schedule.streamed:
        visits = _visits(track, effects, freed, sizes, schedule)
        times.append(visits[0])
        amounts.append(visits[1])
    return kept, _without_zeros(np.concatenate(times), np.concatenate(amounts))


def _visits(
    track: Track, effects: npt.NDArray[np.int64], freed: _Numbers, sizes: Sizes, schedule: Schedule
) -> _Changes:
    """The changes of weights and gradients of streamed stages. `freed`: when each action frees what it held."""
    kinds, owners = effects // schedule.stages, effects % schedule.stages
    moves = np.isin(kinds, (MemoryEffect.FETCH, MemoryEffect.RELEASE)) | _sums_up(kinds)
    changes: list[tuple[float, float]] = []
    there: set[int] = set()
    """The stages that have gradients on the device."""
    for index in np.flatnonzero(moves & np.isin(owners, sorted(schedule.streamed))).tolist():
        stage = int(owners[index])
        weights, gradients = sizes.weights[stage], sizes.parameters[stage]
        if kinds[index] == MemoryEffect.RELEASE:
            changes += [(track.issued[index], -weights), (track.stops[index], -gradients * (stage in there))]
            there.discard(stage)
        elif kinds[index] == MemoryEffect.FETCH:
            returned = track.instructions.details[index].gradients
            changes.append((track.issued[index], weights + gradients * returned))
            there |= {stage} if returned else set()
        elif stage not in there:
            changes.append((float(freed[index]), gradients))
            there.add(stage)
    made = np.array(changes, dtype=np.float64).reshape(-1, 2)
    return made[:, 0], made[:, 1]


def _users(effects: npt.NDArray[np.int64], received: npt.NDArray[np.int64], stages: int) -> _Places:
    """The action that uses each of the `received` messages.

    A stage takes its microbatches in order, and the messages from each other stage arrive in that order.
    """
    source, target = content_stages(received, stages)
    users = np.zeros(len(received), dtype=np.intp)
    for here, there in {*zip(source.tolist(), target.tolist(), strict=True)}:
        own = effects % stages == there
        kinds = effects // stages
        taking = own & (
            np.isin(kinds, (MemoryEffect.FORWARD, MemoryEffect.FORWARD_KEPT)) if here < there else _is_backward(kinds)
        )
        members = np.flatnonzero((source == here) & (target == there))
        users[members] = np.flatnonzero(taking)[: len(members)]
    return users


def _gradients(track: Track, effects: npt.NDArray[np.int64], schedule: Schedule) -> tuple[_Places, _Places, _Places]:
    """Indices of the first backward for each update, of the updates, and of the last backward before each update."""
    kinds, owners = effects // schedule.stages, effects % schedule.stages
    found: list[tuple[_Places, _Places, _Places]] = []
    for stage in schedule.stages_of(track.rank):
        if stage in schedule.streamed:
            continue
        backwards = np.flatnonzero((owners == stage) & _sums_up(kinds))
        updates = np.flatnonzero((owners == stage) & (kinds == MemoryEffect.UPDATE))
        size = schedule.guarantees.microbatches_per_update[stage]
        # Backwards come in the order of their microbatches: where those of each update begin and end.
        ends = _taken(schedule, track.rank, stage, size * np.arange(len(updates) + len(backwards) + 1))
        ends = np.minimum(ends, len(backwards))
        begins, ends = ends[:-1], ends[1:]
        has = np.flatnonzero(ends > begins)
        done = has[has < len(updates)]
        found.append((backwards[begins[has]], updates[done], backwards[ends[done] - 1]))
    if not found:
        return (np.zeros(0, dtype=np.intp),) * 3
    first_backwards, updates, last_backwards = (np.concatenate(indices) for indices in zip(*found, strict=True))
    return first_backwards, updates, last_backwards


def _taken(schedule: Schedule, rank: int, stage: int, microbatches: _Places) -> _Places:
    """How many of the first `microbatches` microbatches `rank` takes."""
    stride = schedule.placement.stride(stage)
    first = 0 if stride == 1 else schedule.placement.stages[stage].index(rank)
    return (microbatches - first + stride - 1) // stride


def _sums(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(map(sum, zip(one, other, strict=True)))


def _is_backward(effects: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Whether an action uses a received gradient."""
    return np.isin(
        effects,
        (
            MemoryEffect.BACKWARD,
            MemoryEffect.BACKWARD_KEPT,
            MemoryEffect.BACKWARD_INPUT,
            MemoryEffect.BACKWARD_INPUT_KEPT,
        ),
    )


def _sums_up(effects: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Whether an action ends the backward of a microbatch, so that its gradients of weights are complete."""
    return np.isin(effects, (MemoryEffect.BACKWARD, MemoryEffect.BACKWARD_KEPT, MemoryEffect.BACKWARD_WEIGHT))


def _without_zeros(times: _Numbers, amounts: _Numbers) -> _Changes:
    changed = amounts != 0
    return times[changed], amounts[changed]


def _totals(changes: _Changes) -> _Changes:
    """Each time of change once, ascending, and the bytes that are held from it on."""
    order = np.argsort(changes[0], kind="stable")
    times, held = changes[0][order], np.cumsum(changes[1][order])
    last = np.append(times[1:] != times[:-1], np.ones(min(1, len(times)), dtype=bool))
    return times[last], held[last]


def _curve(changes: _Changes) -> MemoryCurve:
    times, held = _totals(changes)
    return tuple(zip(times.tolist(), held.tolist(), strict=True))
