"""The invariants of streamed stages: what computes has its weights, and a device holds no more stages than it has room
for.

Rules of this file:
  1. The rows are read action by action, without the pass that made the fetches and releases.
  2. It may rely on the invariants of the stages and of the messages, which hold by then.
"""

from collections import Counter
from collections.abc import Sequence

from penstock.scheduling.actions import (
    BackwardInput,
    Fetch,
    Forward,
    Recompute,
    Reduce,
    Release,
    Update,
    WeightMove,
    WeightReading,
)
from penstock.scheduling.direct_backwards import find_direct
from penstock.scheduling.verification.stage_invariants import KINDS, Row

_ROOM = "no more streamed stages are on a rank at once than it has places"
_MOVES = "weights of streamed stages, and of no others, are fetched where they are not and released where they are"
_WEIGHTS = "a stage computes with weights that are fetched and not released, of the version that it reads"
_GRAPHS = "what a forward saves for its backward is used up before the weights leave"
_SUMS = "replicas sum the gradients of a stage before these leave with the weights"
_UPDATES = "an update of a streamed stage happens on the host, and between steps all weights are there"


def require_residence(rows: Sequence[Row]) -> None:
    """Raises `ScheduleError` for the first invariant that does not hold. `rows`: of all ranks."""
    for row in rows:
        if row.staged.schedule.streamed or (row.kinds >= min(KINDS[Fetch], KINDS[Release])).any():
            _Device(row).read()


class _Device:
    """What of its stages the device of a rank holds, while its row is read."""

    def __init__(self, row: Row) -> None:
        self._row, self._index = row, 0
        self._streamed, self._places = row.staged.schedule.streamed, row.staged.schedule.places
        self._resident: dict[int, int] = {}
        """The version of every streamed stage that is there."""
        self._made = Counter[int]()
        """By stage, its updates."""
        self._direct = find_direct(row.actions)
        self._graphs: set[tuple[int, int]] = set()
        """The stages and microbatches of which autograd may hold the weights."""
        self._summing: set[int] = set()
        """The stages that have gradients for the next update."""

    def read(self) -> None:
        """Raises `ScheduleError` for the first action that breaks an invariant."""
        segments = self._row.segments.tolist()
        for index, action in enumerate(self._row.actions):
            self._index = index
            if index and segments[index] > segments[index - 1]:
                self._require_empty()
            stage = action.stage
            if isinstance(action, WeightMove):
                self._move(action)
            elif stage not in self._streamed:
                continue
            elif isinstance(action, WeightReading):
                self._compute(action)
            elif isinstance(action, Reduce) and stage in self._summing and stage not in self._resident:
                self._fail(_SUMS, f"it before the release of stage {stage}", "let with_residence() place the sums")
            elif isinstance(action, Update):
                if stage in self._resident:
                    self._fail(_UPDATES, f"a release of stage {stage} before", "release the stage first")
                self._made[stage] += 1
                self._summing.discard(stage)
        self._index = len(segments)
        self._require_empty()

    def _move(self, action: WeightMove) -> None:
        stage, version, resident = action.stage, action.version, self._resident
        if stage not in self._streamed:
            self._fail(_MOVES, f"none of stage {stage}, which is not streamed", "stream the stage, or drop it")
        if isinstance(action, Release):
            if resident.get(stage) != version:
                self._fail(_MOVES, f"a fetch of version {version} of stage {stage} before", "drop it, or fetch before")
            if left := sorted(number for of, number in self._graphs if of == stage):
                expected = f"the backward of microbatch {left[0]}, or its weight backward, before"
                self._fail(_GRAPHS, expected, "release the stage later")
            del resident[stage]
            return
        if stage in resident:
            self._fail(_MOVES, f"a release of stage {stage} before", "drop the second fetch")
        if len(resident) == self._places:
            held = ", ".join(map(str, resident))
            self._fail(
                _ROOM, f"a release of one of {held}: places={self._places}", "release before, or give more places"
            )
        if version != self._made[stage]:
            expected = f"version {self._made[stage]}, which the last update made"
            self._fail(_WEIGHTS, expected, f"fetch version {self._made[stage]}")
        resident[stage] = version

    def _compute(self, action: WeightReading) -> None:
        stage, key = action.stage, (action.stage, action.microbatch)
        if self._resident.get(stage) != action.version:
            expected = f"a fetch of version {action.version} of stage {stage} before, and no release since"
            self._fail(_WEIGHTS, expected, "let with_residence() place the fetches")
        if isinstance(action, Recompute) or (isinstance(action, Forward) and key in self._direct):
            self._graphs.add(key)
        elif not isinstance(action, Forward):
            self._summing.add(stage)
            self._graphs.discard(key)
            if isinstance(action, BackwardInput):
                self._graphs.add(key)

    def _require_empty(self) -> None:
        for stage in self._resident:
            self._fail(_UPDATES, f"a release of stage {stage} before the step ends", "release it behind its last use")

    def _fail(self, invariant: str, expected: str, fix: str) -> None:
        self._row.fail(self._index, invariant, expected, fix)
