"""Proofs by columns: the same invariants as action by action, checked on arrays, which takes a third of the time.

The rows are read once, rank by rank, into columns of numbers, and every action is checked. What a rank does with its
microbatches must be its own microbatches in ascending order, so most invariants compare two arrays: the versions of
forwards with those of backwards, or the places of receives with those of the actions that use them.

Shared weights and norms have messages for each update, not for each microbatch. Their rules are those of
`message_invariants`, which run on the few actions that an update needs. That messages arrive in order, and that no rank
waits forever, is proved there, too.

A proof that does not succeed says nothing: the verifier then walks along the actions and reports what it finds.
"""

from dataclasses import dataclass, fields, replace
from itertools import chain, compress
from operator import attrgetter, call
from typing import Final, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt

from penstock.errors import ScheduleError
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
from penstock.scheduling.definitions import NormRule, VersionRule
from penstock.scheduling.lowering import nexts
from penstock.scheduling.verification.message_invariants import ROW_INVARIANTS, are_delivered
from penstock.scheduling.verification.violations import Peaks, StagedPrograms

Numbers: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]
_F, _B, _I, _W, _S, _R, _U, _A = range(8)
_KINDS: Final[dict[type[Action], int]] = {
    kind: number
    for number, kind in enumerate(
        (
            *(Forward, Backward, BackwardInput, BackwardWeight, Send, Receive, Update, Reduce),
            *(SendTied, ReceiveTied, SendNorms, ReceiveNorms),
        )
    )
}
"""Of each kind its number in a column."""
_FIELDS = {kind: attrgetter(*([field.name for field in fields(kind)] + ["version"])[:3]) for kind in _KINDS}
"""Of each kind, what reads its three fields; the version of an all-reduce, which has two, counts twice."""


class _Unproved(Exception):
    """An invariant does not hold on the columns."""


def _require(holds: bool | np.bool_) -> None:
    if not holds:
        raise _Unproved


def _equal(one: Numbers, other: Numbers) -> None:
    _require(np.array_equal(one, other))


def prove_columns(staged: StagedPrograms) -> Peaks | None:
    """Proves the steps of a schedule and their drain, all actions of them; None if it does not succeed."""
    try:
        return _Proof(staged).run()
    except (_Unproved, ScheduleError):
        return None


class _Row:
    """The actions of a rank in columns; `others` is the last field of an action."""

    def __init__(self, rank: int, staged: StagedPrograms) -> None:
        self.rank = rank
        self.actions = staged.programs[rank]
        types = list(map(type, self.actions))
        self.kinds = np.fromiter(map(_KINDS.__getitem__, types), np.int64, len(types))
        numbers = chain.from_iterable(map(call, map(_FIELDS.__getitem__, types), self.actions))
        columns = np.fromiter(numbers, np.int64, 3 * len(types)).reshape(-1, 3)
        self.stages, self.numbers, self.others = np.ascontiguousarray(columns.T)
        ends = [segment[rank] for segment in staged.ends]
        self.segments = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))


@dataclass(slots=True)
class _Turns:
    """Where a stage computes in the row of its rank: forwards, input backwards and weight backwards, by microbatch."""

    mine: Numbers
    forwards: Numbers
    inputs: Numbers
    weights: Numbers
    updates: Numbers


class _Proof:
    def __init__(self, staged: StagedPrograms) -> None:
        schedule = self.schedule = staged.schedule
        self.staged = staged
        self.guarantees = schedule.guarantees
        self.microbatches = staged.microbatches
        self.placement = staged.placement
        self.rare = bool(schedule.ties) or schedule.norm_rule is not NormRule.NONE
        self.peaks = Peaks.of(schedule.shape)
        self.admitted = np.zeros(self.microbatches, np.int64)
        """By microbatch: how many updates the input stage had made when it took it."""
        self.gradient_versions: dict[int, Numbers] = {}

    def run(self) -> Peaks:
        few: list[tuple[Action, ...]] = [() for _ in self.staged.programs]
        # The input stage is first, because it decides what others read.
        for rank in dict.fromkeys(chain.from_iterable(self.placement.stages)):
            row = _Row(rank, self.staged)
            self._check(row)
            few[rank] = self._few(row) if self.rare else ()
        self.peaks.share(self.schedule.placement)
        if self.rare:
            for invariant in ROW_INVARIANTS:
                invariant(replace(self.staged, programs=tuple(few)))
        _require(are_delivered(self.staged))
        return self.peaks

    def _few(self, row: _Row) -> tuple[Action, ...]:
        """The actions of updates, and those of the microbatches that complete an update's gradients."""
        mine = self._mine(row.rank)
        last: set[int] = set()
        for stage in self.placement.stages_of(row.rank):
            rounds = mine // self.guarantees.microbatches_per_update[stage]
            last.update(mine[np.append(rounds[1:] != rounds[:-1], True)[: len(mine)]].tolist())
        chosen = (row.kinds >= _U) | np.isin(row.numbers, list(last))
        return tuple(compress(row.actions, chosen.tolist()))

    def _mine(self, rank: int) -> Numbers:
        own = self.placement.microbatches_of(rank, range(self.microbatches))
        return np.arange(own.start, own.stop, own.step, dtype=np.int64)

    def _check(self, row: _Row) -> None:
        """The invariants that a row keeps or violates by itself."""
        held = self.placement.stages_of(row.rank)
        mine = self._mine(row.rank)
        turns = {stage: _find_turns(row, stage, mine, self.guarantees.trains) for stage in held}
        _require(np.isin(row.stages, held).all())
        self._require_segments(row)
        for stage, turn in turns.items():
            self._require_versions(row, stage, turn)
            if self.guarantees.trains:
                self._require_updates(row, stage, turn)
                self._require_limits(row, stage, turn)
            self._require_data(row, stage, turns)
            self._require_reduces(row, stage, turn)
        if self.guarantees.trains:
            done = (row.kinds == _B) | (row.kinds == _W)
            most = int(np.cumsum((row.kinds == _F).astype(np.int64) - done).max(initial=0))
            _require(most <= self.guarantees.in_flight_of_rank[row.rank])
            self.peaks.in_flight_of_rank[row.rank] = most
        self.peaks.actions += len(row.kinds)
        _require(self.rare or not (row.kinds > _A).any())

    def _require_segments(self, row: _Row) -> None:
        bound = row.kinds < _U if self.schedule.flushes else row.kinds == _F
        _equal(row.numbers[bound] // self.schedule.microbatches, row.segments[bound])
        if self.schedule.definition.updates_at_once:
            updates = row.kinds == _U
            _equal(row.numbers[updates] - 1, row.segments[updates])

    def _require_versions(self, row: _Row, stage: int, turn: _Turns) -> None:
        read = row.others[turn.forwards]
        made = np.searchsorted(turn.updates, turn.forwards)
        if stage == 0:
            self.admitted[turn.mine] = made
        minibatches = turn.mine // self.schedule.microbatches
        match self.guarantees.rule:
            case VersionRule.OWN_MINIBATCH:
                due = minibatches
            case VersionRule.PREVIOUS_MINIBATCH:
                due = np.maximum(minibatches - 1, 0)
            case VersionRule.NEWEST:
                due = made
            case VersionRule.INPUT_STAGE:
                due = self.admitted[turn.mine]
            case VersionRule.INITIAL:
                due = np.zeros_like(minibatches)
            case _ as unknown:
                assert_never(unknown)
        if self.schedule.continued:
            rounds = turn.mine // self.guarantees.microbatches_per_update[stage]
            due = np.minimum(due, rounds - self.guarantees.delays[stage])
        _equal(read, due)
        _require((read <= made).all())
        slots = self.guarantees.versions[stage]
        for places in (turn.forwards, turn.inputs, turn.weights):
            if len(places):
                _equal(row.others[places], read)
                _require((np.searchsorted(turn.updates, places) - read < slots).all())
        ends = np.searchsorted(turn.updates, turn.weights) - read[: len(turn.weights)] + 1
        self.peaks.versions[stage] = max(self.peaks.versions[stage], int(ends.max(initial=1)))

    def _require_updates(self, row: _Row, stage: int, turn: _Turns) -> None:
        size = self.guarantees.microbatches_per_update[stage]
        versions = np.arange(1, -(-self.microbatches // size) + 1)
        _equal(row.numbers[turn.updates], versions)
        ends = np.searchsorted(turn.mine, versions * size)
        some = ends > 0
        _require((turn.weights[ends[some] - 1] < turn.updates[some]).all())
        rounds = turn.mine // size
        taken = row.others[turn.updates]
        _equal(row.others[turn.weights], taken[rounds])
        _equal(taken, self.gradient_versions.setdefault(stage, taken))
        if len(rounds):
            # Of the rounds that this replica has microbatches of, how many it has begun and not updated from yet.
            begun = np.cumsum(np.append(True, rounds[1:] != rounds[:-1]))
            made = np.searchsorted(turn.updates[np.unique(rounds)], turn.inputs)
            _require((begun - made <= self.guarantees.pending_updates[stage]).all())

    def _require_limits(self, row: _Row, stage: int, turn: _Turns) -> None:
        count = np.arange(1, len(turn.mine) + 1)
        most = int((count - np.searchsorted(turn.weights, turn.forwards)).max(initial=0))
        _require(most <= self.guarantees.in_flight[stage])
        self.peaks.in_flight[stage] = max(self.peaks.in_flight[stage], most)
        halves = turn.inputs[row.kinds[turn.inputs] == _I]
        ends = turn.weights[row.kinds[turn.weights] == _W]
        most = int((np.arange(1, len(halves) + 1) - np.searchsorted(ends, halves)).max(initial=0))
        _require(most <= self.guarantees.pending_weight_backwards[stage])
        self.peaks.pending_weight_backwards[stage] = max(self.peaks.pending_weight_backwards[stage], most)

    def _require_data(self, row: _Row, stage: int, turns: dict[int, _Turns]) -> None:
        """Every action comes after what it needs, and messages pass only where the schedule has them."""
        turn = turns[stage]
        here = row.stages == stage
        found = 0
        ways = [(turn.forwards, "forwards", False)]
        if self.guarantees.trains:
            _require((turn.forwards < turn.inputs).all())
            _require(((turn.inputs < turn.weights) | (row.kinds[turn.inputs] == _B)).all())
            ways.append((turn.inputs, "inputs", True))
        for computed, name, later in ways:
            for other in nexts(stage, self.schedule.stages, self.schedule.skips, later=later):
                if other in turns:
                    _require((getattr(turns[other], name) < computed).all())
                else:
                    received = _places_of(row, here, _R, other, turn.mine)
                    _require((received < computed).all())
                    found += len(received)
            for other in nexts(stage, self.schedule.stages, self.schedule.skips, later=not later):
                if other not in turns:
                    sent = _places_of(row, here, _S, other, turn.mine)
                    _require((computed < sent).all())
                    found += len(sent)
        _require(found == np.count_nonzero(here & ((row.kinds == _S) | (row.kinds == _R))))

    def _require_reduces(self, row: _Row, stage: int, turn: _Turns) -> None:
        """Replicas sum their gradients between the last backward and the update. With ties and norms see `_few`."""
        reduces = np.flatnonzero((row.stages == stage) & (row.kinds == _A))
        if self.schedule.placement.replicas(stage) == 1 or not self.guarantees.trains:
            _require(len(reduces) == 0)
            return
        size = self.guarantees.microbatches_per_update[stage]
        _equal(row.numbers[reduces], row.numbers[turn.updates])
        _require((reduces < turn.updates).all())
        ends = np.searchsorted(turn.mine, row.numbers[reduces] * size)
        some = ends > 0
        _require((turn.weights[ends[some] - 1] < reduces[some]).all())


def _find_turns(row: _Row, stage: int, mine: Numbers, trains: bool) -> _Turns:
    """Each microbatch of the rank goes forward and backward once, in ascending order; in an inference forward only."""
    here = row.stages == stage
    forwards, backwards, inputs, weights, updates = (here & (row.kinds == kind) for kind in (_F, _B, _I, _W, _U))
    turns = _Turns(mine, *map(np.flatnonzero, (forwards, backwards | inputs, backwards | weights, updates)))
    _equal(row.numbers[turns.forwards], mine)
    for places in (turns.inputs, turns.weights):
        _equal(row.numbers[places], mine if trains else mine[:0])
    _require(trains or not len(turns.updates))
    return turns


def _places_of(row: _Row, here: Flags, kind: int, other: int, mine: Numbers) -> Numbers:
    """The places of the messages with stage `other`, by microbatch; each of `mine` has one."""
    places = np.flatnonzero(here & (row.kinds == kind) & (row.others == other))
    numbers = row.numbers[places]
    if not np.array_equal(numbers, mine):
        order = np.argsort(numbers)
        _equal(numbers[order], mine)
        places = places[order]
    return places
