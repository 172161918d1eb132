"""The invariants that each stage keeps by itself: order, weight versions, and what it holds in memory.

The rows are read once, rank by rank, into columns of numbers, and an invariant compares whole columns: the versions of
forwards with those of backwards, or the places of updates with those of the backwards that they sum up.

Rules of this file:
  1. What is expected is counted along the rows, without the order that made them.
  2. An invariant is a function of the turns of a stage on one rank. It reports its first violation.
  3. An invariant may rely on those before it in `_INVARIANTS`, which hold for all stages by then.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from operator import attrgetter, call
from typing import Final, NoReturn, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt

from penstock.errors import ScheduleError
from penstock.scheduling.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Fetch,
    Forward,
    Offload,
    Receive,
    ReceiveNorms,
    ReceiveTied,
    Recompute,
    Reduce,
    Release,
    Reload,
    Send,
    SendNorms,
    SendTied,
    Update,
)
from penstock.scheduling.definitions import Guarantees, VersionRule
from penstock.scheduling.verification.violations import Peaks, StagedPrograms, report

Numbers: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]
KINDS: Final[dict[type[Action], int]] = {
    kind: number
    for number, kind in enumerate(
        (
            *(Forward, Backward, BackwardInput, BackwardWeight, Recompute, Offload, Reload, Send, Receive),
            *(Update, Reduce, SendTied, ReceiveTied, SendNorms, ReceiveNorms, Fetch, Release),
        )
    )
}
"""Of each kind of action its number in a column; the kinds of microbatches come before those of updates."""
_F, _B, _I, _W = (KINDS[kind] for kind in (Forward, Backward, BackwardInput, BackwardWeight))
_U, _C, _OFFLOAD, _RELOAD = (KINDS[kind] for kind in (Update, Recompute, Offload, Reload))
_NAMES = {kind: [field.name for field in fields(kind)] for kind in KINDS}
_FIELDS = {kind: attrgetter(*(names + names[1:])[:3]) for kind, names in _NAMES.items()}
"""Of each kind, what reads its three fields; the last of those that have two, as an all-reduce has, counts twice."""


class Row:
    """The actions of a rank in columns; `others` is the last field of an action."""

    def __init__(self, rank: int, staged: StagedPrograms) -> None:
        self.rank, self.staged = rank, staged
        self.actions = staged.programs[rank]
        types = list(map(type, self.actions))
        self.kinds = np.fromiter(map(KINDS.__getitem__, types), np.int64, len(types))
        numbers = chain.from_iterable(map(call, map(_FIELDS.__getitem__, types), self.actions))
        try:
            columns = np.fromiter(numbers, np.int64, 3 * len(types)).reshape(-1, 3)
        except OverflowError as error:
            raise ScheduleError(f"rank {rank}: an action has a number above 2^63; number from 0 on") from error
        self.stages, self.numbers, self.others = np.ascontiguousarray(columns.T)
        ends = [segment[rank] for segment in staged.ends]
        self.segments = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
        own = staged.placement.microbatches_of(rank, range(staged.microbatches))
        self.mine = np.arange(own.start, own.stop, own.step, dtype=np.int64)
        """The microbatches that the rank has to take."""

    def fail(self, index: int | np.int64, invariant: str, expected: str, fix: str) -> NoReturn:
        report(self.staged, invariant, self.rank, int(index), expected=expected, fix=fix)


class Turns:
    """Where a stage computes in the `row` of its rank: forwards, input and weight backwards, and updates; and where it
    offloads, reloads and recomputes.
    """

    def __init__(self, row: Row, stage: int) -> None:
        here = row.stages == stage
        forwards, backwards, inputs, weights, updates = (here & (row.kinds == kind) for kind in (_F, _B, _I, _W, _U))
        self.row, self.stage = row, stage
        self.forwards, self.inputs, self.weights, self.updates = map(
            np.flatnonzero, (forwards, backwards | inputs, backwards | weights, updates)
        )
        self.offloads, self.reloads, self.recomputations = (
            np.flatnonzero(here & (row.kinds == kind)) for kind in (_OFFLOAD, _RELOAD, _C)
        )
        self.size = self.guarantees.microbatches_per_update[stage]

    @property
    def guarantees(self) -> Guarantees:
        return self.row.staged.guarantees

    @property
    def backwards(self) -> tuple[Numbers, Numbers]:
        return self.inputs, self.weights

    @property
    def rounds(self) -> Numbers:
        """The updates before the one that sums up a microbatch, for each of the rank."""
        return self.row.mine // self.size

    def made(self, places: Numbers) -> Numbers:
        """How many updates come before each of the `places`."""
        return np.searchsorted(self.updates, places)


@dataclass(slots=True)
class _Proof:
    staged: StagedPrograms
    peaks: Peaks
    admitted: Numbers
    """By microbatch: how many updates the input stage had made when it took it."""
    gradient_versions: dict[int, Numbers]
    """By stage, the versions that the updates of its first replica name."""


def require_stage_invariants(staged: StagedPrograms) -> tuple[Peaks, list[Row]]:
    """Raises `ScheduleError` for the first invariant that does not hold; what the programs reach, if all hold."""
    proof = _Proof(staged, Peaks.of(staged.shape), np.zeros(staged.microbatches, np.int64), {})
    turns: list[Turns] = []
    rows = [Row(rank, staged) for rank in dict.fromkeys(chain.from_iterable(staged.placement.stages))]
    for row in rows:
        _require_places(row)
        turns += [Turns(row, stage) for stage in staged.placement.stages_of(row.rank)]
        proof.peaks.actions += len(row.actions)
    for own in turns:
        if own.stage == 0:
            proof.admitted[own.row.numbers[own.forwards]] = own.made(own.forwards)
    for invariant in _INVARIANTS:
        for own in turns:
            invariant(proof, own)
    proof.peaks.share(staged.schedule.placement)
    for row in rows if staged.in_segments else ():
        _require_segments(row)
    return proof.peaks, rows


def _first(wrong: Flags) -> int | None:
    """The index of the first violation."""
    return int(wrong.argmax()) if wrong.any() else None


def _require_places(row: Row) -> None:
    invariant = "an action is of a stage of its rank and of a microbatch of the program"
    held = row.staged.schedule.stages_of(row.rank)
    elsewhere = ~np.isin(row.stages, held)
    if (index := _first(elsewhere | (row.kinds < _U) & (row.numbers >= row.staged.microbatches))) is not None:
        if elsewhere[index]:
            row.fail(index, invariant, f"stages {sorted(held)} on rank {row.rank}", "move the action")
        expected = f"microbatches 0 to {row.staged.microbatches - 1}"
        row.fail(index, invariant, expected, "drop the action, or verify more minibatches")


def _require_segments(row: Row) -> None:
    """A step carries the forwards of its own minibatch, a drain none; a flushing step carries all else of it too.

    A stage has to know at its forward what it will offload, so that this is in the step of the forward.
    """
    schedule = row.staged.schedule
    bound = row.kinds < _U if schedule.flushes else (row.kinds == _F) | (row.kinds == _OFFLOAD)
    due = row.numbers // schedule.microbatches
    if schedule.definition.updates_at_once:
        updates = row.kinds == _U
        bound, due = bound | updates, np.where(updates, row.numbers - 1, due)
    if (index := _first(bound & (due != row.segments))) is not None:
        what = "actions" if schedule.flushes else "forwards and offloads"
        minibatch = int(row.segments[index])
        own = schedule.shape.microbatches_of(minibatch)
        drains = minibatch == row.staged.minibatches
        only = "no such action" if drains else f"only microbatches {own.start} to {own.stop - 1}"
        row.fail(
            index,
            f"a step carries the {what} of its own minibatch, and a drain none",
            f"in {row.staged.name_of(minibatch)} {only}",
            "yield it in the step that it belongs to",
        )


def _require_training(proof: _Proof, turns: Turns) -> None:
    others = np.concatenate((*turns.backwards, turns.updates, turns.offloads, turns.reloads, turns.recomputations))
    if len(others) and not turns.guarantees.trains:
        turns.row.fail(others.min(), "an inference has forwards only", "no backward and no update", "drop it, or train")


def _require_once(proof: _Proof, turns: Turns) -> None:
    invariant = "each microbatch goes forward and backward exactly once on each stage"
    row, stage = turns.row, turns.stage
    for places in (turns.forwards, *turns.backwards):
        numbers = row.numbers[places]
        seen = np.unique(numbers, return_index=True)[1]
        if len(repeated := np.delete(places, seen)):
            row.fail(repeated.min(), invariant, "a microbatch that is not done yet", "drop the second one")
        if (index := _first(~np.isin(numbers, row.mine))) is not None:
            rank = row.staged.placement.rank_of(stage, int(numbers[index]))
            row.fail(places[index], invariant, f"it on rank {rank}", f"move it to rank {rank}")
    if len(missing := np.setdiff1d(row.mine, row.numbers[turns.forwards])):
        expected = f"a forward of microbatch {missing[0]} on stage {stage} before the end"
        row.fail(len(row.actions), invariant, expected, "add it, or verify fewer minibatches")


def _require_drained(proof: _Proof, turns: Turns) -> None:
    invariant = "nothing is in flight after the drain: every forward had its backward"
    row = turns.row
    forwards, inputs, weights = (row.numbers[places] for places in (turns.forwards, *turns.backwards))
    for done, left in ((weights, "the weight backward"), (inputs, "the input backward")):
        index = _first(~np.isin(forwards, done)) if turns.guarantees.trains else None
        if index is not None:
            begun = np.isin(forwards[index], np.union1d(inputs, weights))
            expected = f"{left if begun else 'a backward'} of microbatch {forwards[index]} on stage {turns.stage}"
            fix = "let the step or the drain yield it"
            row.fail(turns.forwards[index], invariant, f"{expected} before the end", fix)


def _require_ascending(proof: _Proof, turns: Turns) -> None:
    invariant = "a stage takes its microbatches in ascending order, so that all schedules sum gradients alike"
    row = turns.row
    for places in (turns.forwards, *turns.backwards):
        numbers, due = row.numbers[places], row.mine[: len(places)]
        if (index := _first(numbers != due)) is not None:
            fix = f"put {due[index]} before {numbers[index]}"
            row.fail(places[index], invariant, f"microbatch {due[index]} first", fix)


def _require_stash(proof: _Proof, turns: Turns) -> None:
    invariant = "a backward reads the version that its forward read"
    row = turns.row
    for places in turns.backwards:
        read = row.others[turns.forwards[: len(places)]]
        if (index := _first(row.others[places] != read)) is not None:
            expected = f"version {read[index]}, which {row.actions[turns.forwards[index]]} read"
            row.fail(places[index], invariant, expected, "give both the same version")


def _require_round_trips(proof: _Proof, turns: Turns) -> None:
    """What is offloaded is whole, nothing reads it while it is away, and it is back before the backward."""
    row, stage = turns.row, turns.stage
    invariant = f"stage {stage} offloads and reloads a microbatch once, after its forward and before its backward"
    for places in (turns.offloads, turns.reloads):
        numbers = row.numbers[places]
        seen = np.unique(numbers, return_index=True)[1]
        if len(repeated := np.delete(places, seen)):
            row.fail(repeated.min(), invariant, "a microbatch for which it was not done yet", "drop the second one")
    for places, others, missing in (
        (turns.offloads, turns.forwards, "a forward"),
        (turns.offloads, turns.reloads, "a reload"),
        (turns.reloads, turns.offloads, "an offload"),
    ):
        if (index := _first(~np.isin(row.numbers[places], row.numbers[others]))) is not None:
            number = row.numbers[places[index]]
            row.fail(places[index], invariant, f"{missing} of microbatch {number}", "add it, or drop this one")
    # Forwards and backwards ascend, so that those of a microbatch have its place among the rank's own.
    away, back = (places[np.argsort(row.numbers[places])] for places in (turns.offloads, turns.reloads))
    own = np.searchsorted(row.mine, row.numbers[away])
    for before, after, expected in (
        (turns.forwards[own], away, "its forward before"),
        (away, back, "its offload before"),
        (back, turns.inputs[own], "its reload before"),
    ):
        if (index := _first(before > after)) is not None:
            row.fail(after[index], invariant, expected, "order them so")


def _require_recomputations(proof: _Proof, turns: Turns) -> None:
    """What is recomputed is whole before its backward, and is of the version that its forward read."""
    row, places = turns.row, turns.recomputations
    invariant = f"stage {turns.stage} recomputes a microbatch once, between its forward and its backward"
    numbers = row.numbers[places]
    if len(repeated := np.delete(places, np.unique(numbers, return_index=True)[1])):
        row.fail(repeated.min(), invariant, "a microbatch that it has not recomputed yet", "drop the second one")
    if (index := _first(~np.isin(numbers, row.numbers[turns.inputs]))) is not None:
        row.fail(places[index], invariant, f"a backward of microbatch {numbers[index]}", "add it, or drop this one")
    own = np.searchsorted(row.mine, numbers)
    forwards, backwards = turns.forwards[own], turns.inputs[own]
    if (index := _first((places < forwards) | (places > backwards))) is not None:
        row.fail(places[index], invariant, "its forward before it and its backward after it", "order them so")
    if (index := _first(row.others[places] != row.others[forwards])) is not None:
        expected = f"version {row.others[forwards[index]]}, which {row.actions[forwards[index]]} read"
        row.fail(places[index], invariant, expected, "give both the same version")


def _require_version(proof: _Proof, turns: Turns) -> None:
    invariant = f"a forward reads {turns.guarantees.rule.value}"
    row, stage = turns.row, turns.stage
    made, read = turns.made(turns.forwards), row.others[turns.forwards]
    due = _versions_due(proof, turns, made)
    if (index := _first(read != due)) is not None:
        expected = f"version {due[index]} for microbatch {row.mine[index]} on stage {stage}"
        row.fail(turns.forwards[index], invariant, expected, f"read version {due[index]}")
    if (index := _first(read > made)) is not None:
        expected = f"a version that exists: stage {stage} has made only {made[index]} by then"
        row.fail(turns.forwards[index], invariant, expected, "put the update before the forward, or the forward later")


def _versions_due(proof: _Proof, turns: Turns, made: Numbers) -> Numbers:
    """The version that each forward has to read. `made`: the updates before it."""
    minibatches = turns.row.mine // proof.staged.schedule.microbatches
    match turns.guarantees.rule:
        case VersionRule.OWN_MINIBATCH:
            due = minibatches
        case VersionRule.PREVIOUS_MINIBATCH:
            due = np.maximum(minibatches - 1, 0)
        case VersionRule.NEWEST:
            due = made
        case VersionRule.INPUT_STAGE:
            due = proof.admitted[turns.row.mine]
        case VersionRule.INITIAL:
            due = np.zeros_like(minibatches)
        case _ as unknown:
            assert_never(unknown)
    if proof.staged.schedule.continued:
        # The version that the stage reads where its pipe has always been full.
        due = np.minimum(due, turns.rounds - turns.guarantees.delays[turns.stage])
    return due


def _require_updates(proof: _Proof, turns: Turns) -> None:
    invariant = "an update makes the next version from all backwards of its microbatches, and they read one version"
    row, stage, size = turns.row, turns.stage, turns.size
    if not turns.guarantees.trains:
        return
    versions = np.arange(1, len(turns.updates) + 1)
    if (index := _first(row.numbers[turns.updates] != versions)) is not None:
        due = versions[index]
        row.fail(turns.updates[index], invariant, f"version {due}, the next of stage {stage}", f"make version {due}")
    starts, stops = np.searchsorted(row.mine, (versions - 1) * size), np.searchsorted(row.mine, versions * size)
    done = np.searchsorted(turns.weights, turns.updates)
    if (index := _first(done < stops)) is not None:
        found, due = max(done[index] - starts[index], 0), stops[index] - starts[index]
        row.fail(
            turns.updates[index],
            invariant,
            f"{due} backwards of stage {stage} for it, found {found}",
            "move the update",
        )
    if len(versions) != -(-proof.staged.microbatches // size):
        expected = f"an update of stage {stage} after its last backward"
        row.fail(len(row.actions), invariant, expected, "yield the update after the last backward")
    taken, read = row.others[turns.updates], row.others[turns.weights]
    named = proof.gradient_versions.setdefault(stage, taken)
    wrong = named != taken
    wrong[turns.rounds[read != taken[turns.rounds]]] = True
    if (index := _first(wrong)) is not None:
        others = {int(named[index]), *read[turns.rounds == index].tolist()} - {int(taken[index])}
        expected = f"gradients at version {', '.join(map(str, sorted(others)))}"
        row.fail(turns.updates[index], invariant, expected, "name the version the backwards read")


def _require_pending_updates(proof: _Proof, turns: Turns) -> None:
    rounds, stage = turns.rounds, turns.stage
    if not len(turns.inputs):
        return
    # Of the rounds that this replica has microbatches of, how many it has begun and not updated from yet.
    own, begun = np.unique(rounds, return_inverse=True)
    made = np.searchsorted(turns.updates[own], turns.inputs)
    most = turns.guarantees.pending_updates[stage]
    if (index := _first(begun + 1 - made > most)) is not None:
        invariant = f"pending updates stay within the guarantee: at most {most} on stage {stage}"
        expected = f"the update of stage {stage} to version {own[made[index]] + 1} first"
        turns.row.fail(turns.inputs[index], invariant, expected, "update first, or guarantee more")


def _require_slots(proof: _Proof, turns: Turns) -> None:
    row, stage = turns.row, turns.stage
    slots = turns.guarantees.versions[stage]
    for places in (turns.forwards, *turns.backwards):
        newest, read = turns.made(places), row.others[places]
        if (index := _first(newest - read >= slots)) is not None:
            invariant = f"no version is overwritten while it is needed: stage {stage} keeps {slots}"
            lost = f"{read[index]} gave its slot to {read[index] + slots}"
            expected = f"version {newest[index] - slots + 1} or newer: {lost}"
            row.fail(places[index], invariant, expected, "update later, or guarantee more versions")
    alive = turns.made(turns.weights) - row.others[turns.weights] + 1
    proof.peaks.versions[stage] = int(alive.max(initial=proof.peaks.versions[stage]))


def _require_in_flight(proof: _Proof, turns: Turns) -> None:
    row, stage, guarantees, peaks = turns.row, turns.stage, turns.guarantees, proof.peaks
    if not guarantees.trains:
        return
    done = (row.kinds == _B) | (row.kinds == _W)
    of_rank = np.cumsum((row.kinds == _F).astype(np.int64) - done)[turns.forwards]
    of_stage = np.arange(1, len(turns.forwards) + 1) - np.searchsorted(turns.weights, turns.forwards)
    for held, most, where in (
        (of_stage, guarantees.in_flight[stage], f"on stage {stage}"),
        (of_rank, guarantees.in_flight_of_rank[row.rank], "on all stages of a rank"),
    ):
        if (index := _first(held > most)) is not None:
            invariant = f"activations in flight stay within the guarantee: at most {most} {where}"
            expected = f"a backward first: {most} in flight already"
            row.fail(turns.forwards[index], invariant, expected, "run a backward first, or guarantee more")
    peaks.in_flight[stage] = int(of_stage.max(initial=peaks.in_flight[stage]))
    peaks.in_flight_of_rank[row.rank] = int(of_rank.max(initial=peaks.in_flight_of_rank[row.rank]))


def _require_weight_backwards(proof: _Proof, turns: Turns) -> None:
    row, stage, peaks = turns.row, turns.stage, proof.peaks.pending_weight_backwards
    most = turns.guarantees.pending_weight_backwards[stage]
    halves = turns.inputs[row.kinds[turns.inputs] == _I]
    ends = turns.weights[row.kinds[turns.weights] == _W]
    pending = np.arange(1, len(halves) + 1) - np.searchsorted(ends, halves)
    if (index := _first(pending > most)) is not None:
        invariant = f"microbatches that wait for their weight backward stay within the guarantee: at most {most}"
        fix = "run a weight backward first, let a whole backward do both, or guarantee more"
        expected = f"a weight backward first: {pending[index] - 1} wait already"
        row.fail(halves[index], f"{invariant} on stage {stage}", expected, fix)
    peaks[stage] = int(pending.max(initial=peaks[stage]))


_INVARIANTS: Final[Sequence[Callable[[_Proof, Turns], None]]] = (
    _require_training,
    _require_once,
    _require_drained,
    _require_ascending,
    _require_stash,
    _require_round_trips,
    _require_recomputations,
    _require_version,
    _require_updates,
    _require_pending_updates,
    _require_slots,
    _require_in_flight,
    _require_weight_backwards,
)
