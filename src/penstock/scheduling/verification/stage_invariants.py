"""The invariants that each stage keeps by itself: order, weight versions, and what it holds in memory.

One walk along the rows counts what every stage has done, without the order that made the rows, and asks each invariant
about each action.

Rules of this file:
  1. An invariant is a function of the counts before an action, and of that action, or None at the end of the row.
     It yields its violations.
  2. An invariant may rely on those before it in `_INVARIANTS`; the violation of the first one is reported.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, TypeAlias, assert_never

from penstock.scheduling.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    InputGradients,
    Receive,
    Send,
    Update,
    WeightGradients,
)
from penstock.scheduling.definitions import Guarantees, VersionRule
from penstock.scheduling.verification.violations import Peaks, StagedPrograms, report


@dataclass(slots=True)
class _Counts:
    """What a replica has done of its stage so far.

    `mine`: the microbatches that it has to take. `beside`: the counts of all stages of its rank. `admitted`: by
    microbatch, how many updates the input stage had made when it took it. `named`: by stage and version, the gradient
    version of the first replica's update.
    """

    staged: StagedPrograms
    stage: int
    rank: int
    mine: range
    beside: Sequence["_Counts"]
    admitted: dict[int, int]
    named: dict[tuple[int, int], int]
    forwards: dict[int, Forward] = field(default_factory=dict)
    inputs: set[int] = field(default_factory=set)
    weights: set[int] = field(default_factory=set)
    newest: int = 0
    sums: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By the version to make: the versions that the backwards which it sums up read."""
    begun: set[int] = field(default_factory=set)
    """The versions to make that have gradients."""

    @property
    def guarantees(self) -> Guarantees:
        return self.staged.guarantees

    @property
    def in_flight(self) -> int:
        return len(self.forwards) - len(self.weights)

    @property
    def in_flight_of_rank(self) -> int:
        return sum(counts.in_flight for counts in self.beside)

    @property
    def pending(self) -> int:
        return len(self.inputs) - len(self.weights)

    def update_of(self, microbatch: int) -> int:
        """The version that sums up the gradients of `microbatch`."""
        return microbatch // self.guarantees.microbatches_per_update[self.stage] + 1

    def add(self, action: Compute) -> None:
        if isinstance(action, Update):
            self.newest += 1
            self.begun.discard(action.version)
            self.sums.pop(action.version, None)
            return
        if isinstance(action, Forward):
            self.forwards[action.microbatch] = action
            if self.stage == 0:
                self.admitted[action.microbatch] = self.newest
        if isinstance(action, InputGradients):
            self.inputs.add(action.microbatch)
            # An input backward may make gradients of weights, too: of those that are not split.
            self.begun.add(self.update_of(action.microbatch))
        if isinstance(action, WeightGradients):
            self.weights.add(action.microbatch)
            self.sums[self.update_of(action.microbatch)].append(action.version)


@dataclass(frozen=True, slots=True)
class _Violation:
    """An invariant that does not hold at an action: at `action`, or at the one that was asked about."""

    invariant: str
    expected: str
    fix: str
    action: Compute | None = None


_Invariant: TypeAlias = Callable[[_Counts, Compute | None], Iterator[_Violation]]


def require_stage_invariants(staged: StagedPrograms) -> Peaks:
    """Raises `ScheduleError` for the first invariant that does not hold; what the programs reach, if all hold."""
    _require_places(staged)
    shape = staged.shape
    peaks = Peaks.of(shape)
    admitted: dict[int, int] = {}
    named: dict[tuple[int, int], int] = {}
    asked: Sequence[_Invariant] = _INVARIANTS
    found: tuple[int, int, _Violation] | None = None
    # The input stage is first, because it decides what others read.
    for rank in dict.fromkeys(chain.from_iterable(staged.placement.stages)):
        row, beside = staged.programs[rank], list[_Counts]()
        mine = staged.placement.microbatches_of(rank, range(staged.microbatches))
        for stage in staged.placement.stages_of(rank):
            counts = _Counts(staged, stage, rank, mine, beside, admitted=admitted, named=named)
            beside.append(counts)
        by_stage = {counts.stage: counts for counts in beside}
        turns = [(index, by_stage[action.stage], action) for index, action in enumerate(row)]
        for index, counts, action in (*turns, *((len(row), counts, None) for counts in beside)):
            if not isinstance(action, Compute | None):
                continue
            for number, invariant in enumerate(asked):
                if violation := next(invariant(counts, action), None):
                    found = rank, index if violation.action is None else row.index(violation.action), violation
                    asked = _INVARIANTS[:number]
                    break
            if action is not None:
                counts.add(action)
                _note(peaks, counts, action)
    if found is not None:
        rank, index, violation = found
        report(staged, violation.invariant, rank, index, expected=violation.expected, fix=violation.fix)
    peaks.share(staged.schedule.placement)
    peaks.actions = sum(map(len, staged.programs))
    return peaks


def _require_places(staged: StagedPrograms) -> None:
    invariant = "an action is of a stage of its rank and of a microbatch of the program"
    for rank, row in enumerate(staged.programs):
        mine = staged.schedule.stages_of(rank)
        for index, action in enumerate(row):
            if action.stage not in mine:
                expected = f"stages {sorted(mine)} on rank {rank}"
                report(staged, invariant, rank, index, expected=expected, fix="move the action")
            if not isinstance(action, Forward | InputGradients | WeightGradients | Send | Receive):
                continue
            if action.microbatch >= staged.microbatches:
                expected, fix = f"microbatches 0 to {staged.microbatches - 1}", "verify more minibatches"
                report(staged, invariant, rank, index, expected=expected, fix=f"drop the action, or {fix}")


def _note(peaks: Peaks, counts: _Counts, action: Compute) -> None:
    """Adds what the replica has reached with `action`."""
    stage, rank = counts.stage, counts.rank
    if counts.guarantees.trains:
        peaks.in_flight[stage] = max(peaks.in_flight[stage], counts.in_flight)
        peaks.in_flight_of_rank[rank] = max(peaks.in_flight_of_rank[rank], counts.in_flight_of_rank)
    peaks.pending_weight_backwards[stage] = max(peaks.pending_weight_backwards[stage], counts.pending)
    if isinstance(action, WeightGradients):
        peaks.versions[stage] = max(peaks.versions[stage], counts.newest - action.version + 1)


def _require_training(counts: _Counts, action: Compute | None) -> Iterator[_Violation]:
    if not (action is None or isinstance(action, Forward) or counts.guarantees.trains):
        yield _Violation("an inference has forwards only", "no backward and no update", "drop it, or train")


def _require_once(counts: _Counts, action: Compute | None) -> Iterator[_Violation]:
    invariant = "each microbatch goes forward and backward exactly once on each stage"
    if action is None:
        for missing in counts.mine:
            if missing not in counts.forwards:
                expected = f"a forward of microbatch {missing} on stage {counts.stage} before the end"
                yield _Violation(invariant, expected, "add it, or verify fewer minibatches")
    elif not isinstance(action, Update):
        microbatch = action.microbatch
        if (
            (isinstance(action, Forward) and microbatch in counts.forwards)
            or (isinstance(action, InputGradients) and microbatch in counts.inputs)
            or (isinstance(action, WeightGradients) and microbatch in counts.weights)
        ):
            yield _Violation(invariant, "a microbatch that is not done yet", "drop the second one")
        if microbatch not in counts.mine:
            rank = counts.staged.placement.rank_of(counts.stage, microbatch)
            yield _Violation(invariant, f"it on rank {rank}", f"move it to rank {rank}")


def _require_drained(counts: _Counts, action: Compute | None) -> Iterator[_Violation]:
    invariant = "nothing is in flight after the drain: every forward had its backward"
    if action is not None or not counts.guarantees.trains:
        return
    for microbatch, forward in counts.forwards.items():
        if microbatch not in counts.weights:
            left = "the weight backward" if microbatch in counts.inputs else "a backward"
            expected = f"{left} of microbatch {microbatch} on stage {counts.stage} before the end"
            yield _Violation(invariant, expected, "let the step or the drain yield it", forward)


def _require_ascending(counts: _Counts, action: Compute | None) -> Iterator[_Violation]:
    invariant = "a stage takes its microbatches in ascending order, so that all schedules sum gradients alike"
    match action:
        case None | Update():
            return
        case Forward():
            done = len(counts.forwards)
        case BackwardInput():
            done = len(counts.inputs)
        case BackwardWeight():
            done = len(counts.weights)
        case Backward():
            # The weight backwards that are left come first.
            done = min(len(counts.inputs), len(counts.weights))
        case _:
            assert_never(action)
    due, microbatch = counts.mine[done], action.microbatch
    if microbatch != due:
        yield _Violation(invariant, f"microbatch {due} first", f"put {due} before {microbatch}")


def _require_stash(counts: _Counts, action: Compute | None) -> Iterator[_Violation]:
    invariant = "a backward reads the version that its forward read"
    if isinstance(action, InputGradients | WeightGradients):
        # A backward before its forward is left to the invariant of data.
        forward = counts.forwards.get(action.microbatch)
        if forward is not None and action.version != forward.version:
            expected = f"version {forward.version}, which {forward} read"
            yield _Violation(invariant, expected, "give both the same version")


def _require_version(counts: _Counts, action: Compute | None) -> Iterator[_Violation]:
    if not isinstance(action, Forward):
        return
    invariant = f"a forward reads {counts.guarantees.rule.value}"
    microbatch, version, newest = action.microbatch, action.version, counts.newest
    due = _version_due(counts, microbatch)
    if counts.staged.schedule.continued:
        # The version that the stage reads where its pipe has always been full.
        due = min(due, counts.update_of(microbatch) - 1 - counts.guarantees.delays[counts.stage])
    if version != due:
        expected = f"version {due} for microbatch {microbatch} on stage {counts.stage}"
        yield _Violation(invariant, expected, f"read version {due}")
    if version > newest:
        expected = f"a version that exists: stage {counts.stage} has made only {newest} by then"
        yield _Violation(invariant, expected, "put the update before the forward, or the forward later")


def _version_due(counts: _Counts, microbatch: int) -> int:
    minibatch = microbatch // counts.staged.shape.microbatches
    match counts.guarantees.rule:
        case VersionRule.OWN_MINIBATCH:
            return minibatch
        case VersionRule.PREVIOUS_MINIBATCH:
            return max(minibatch - 1, 0)
        case VersionRule.NEWEST:
            return counts.newest
        case VersionRule.INPUT_STAGE:
            return counts.admitted.get(microbatch, counts.newest)
        case VersionRule.INITIAL:
            return 0
        case _ as unknown:
            assert_never(unknown)


def _require_updates(counts: _Counts, action: Compute | None) -> Iterator[_Violation]:
    invariant = "an update makes the next version from all backwards of its microbatches, and they read one version"
    stage, following = counts.stage, counts.newest + 1
    size = counts.guarantees.microbatches_per_update[stage]
    if isinstance(action, Update):
        version, gradient_version = action.version, action.gradient_version
        if version != following:
            yield _Violation(invariant, f"version {following}, the next of stage {stage}", f"make version {following}")
        taken = counts.sums.get(version, [])
        summed = range((version - 1) * size, min(version * size, counts.staged.microbatches))
        due = len(counts.staged.placement.microbatches_of(counts.rank, summed))
        if len(taken) != due:
            expected = f"{due} backwards of stage {stage} for it, found {len(taken)}"
            yield _Violation(invariant, expected, "move the update")
        others = {counts.named.setdefault((stage, version), gradient_version), *taken} - {gradient_version}
        if others:
            expected = f"gradients at version {', '.join(map(str, sorted(others)))}"
            yield _Violation(invariant, expected, "name the version the backwards read")
    elif action is None and counts.guarantees.trains:
        last = -(-counts.staged.microbatches // size)
        if counts.sums or counts.newest != last:
            expected = f"an update of stage {stage} after its last backward"
            yield _Violation(invariant, expected, "yield the update after the last backward")


def _require_pending_updates(counts: _Counts, action: Compute | None) -> Iterator[_Violation]:
    if isinstance(action, InputGradients):
        most = counts.guarantees.pending_updates[counts.stage]
        invariant = f"pending updates stay within the guarantee: at most {most} on stage {counts.stage}"
        waiting = {*counts.begun, counts.update_of(action.microbatch)}
        if len(waiting) > most:
            expected = f"the update of stage {counts.stage} to version {min(waiting)} first"
            yield _Violation(invariant, expected, "update first, or guarantee more")


def _require_slots(counts: _Counts, action: Compute | None) -> Iterator[_Violation]:
    slots, newest = counts.guarantees.versions[counts.stage], counts.newest
    invariant = f"no version is overwritten while it is needed: stage {counts.stage} keeps {slots}"
    if action is not None and not isinstance(action, Update) and newest - action.version >= slots:
        lost = f"{action.version} gave its slot to {action.version + slots}"
        expected = f"version {newest - slots + 1} or newer: {lost}"
        yield _Violation(invariant, expected, "update later, or guarantee more versions")


def _require_in_flight(counts: _Counts, action: Compute | None) -> Iterator[_Violation]:
    if not isinstance(action, Forward) or not counts.guarantees.trains:
        return
    for held, most, where in (
        (counts.in_flight, counts.guarantees.in_flight[counts.stage], f"on stage {counts.stage}"),
        (counts.in_flight_of_rank, counts.guarantees.in_flight_of_rank[counts.rank], "on all stages of a rank"),
    ):
        if held >= most:
            invariant = f"activations in flight stay within the guarantee: at most {most} {where}"
            expected = f"a backward first: {most} in flight already"
            yield _Violation(invariant, expected, "run a backward first, or guarantee more")


def _require_weight_backwards(counts: _Counts, action: Compute | None) -> Iterator[_Violation]:
    most, pending = counts.guarantees.pending_weight_backwards[counts.stage], counts.pending
    if isinstance(action, BackwardInput) and pending >= most:
        invariant = f"microbatches that wait for their weight backward stay within the guarantee: at most {most}"
        invariant += f" on stage {counts.stage}"
        fix = "run a weight backward first, let a whole backward do both, or guarantee more"
        yield _Violation(invariant, f"a weight backward first: {pending} wait already", fix)


_INVARIANTS: Final[tuple[_Invariant, ...]] = (
    _require_training,
    _require_once,
    _require_drained,
    _require_ascending,
    _require_stash,
    _require_version,
    _require_updates,
    _require_pending_updates,
    _require_slots,
    _require_in_flight,
    _require_weight_backwards,
)
