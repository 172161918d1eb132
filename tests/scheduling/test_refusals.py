"""What no schedule can be is refused, with what would be right."""

from collections.abc import Callable
from typing import Any

import pytest

import penstock
from penstock.errors import ScheduleError
from penstock.scheduling import read_torch_csv, torch_csv
from penstock.scheduling.actions import parse_programs
from penstock.scheduling.lowering import lower
from penstock.scheduling.placements import Placement
from penstock.values.plans import Plan, Stage, schedule

A: Any = penstock.Schedule
PAIRS = Placement(((0, 1), (2, 3)))
UNEQUAL = Plan((Stage(0, 3, (0, 1)), Stage(3, 4, (2,))), "pipedream", 2, vertical_sync=True)
FOLDED = Placement(((0, 1), (2,), (2,), (0, 1)))
BOTH = frozenset({0, 1})
TIE = "expected two or more different stages of 0 to 2, ascending"
SKIP = "with other stages between the two"
CSV = "expected one that flushes, without replicas"


def ties(*group: int) -> Callable[[], object]:
    return lambda: A("gpipe", 3, 3, ties=(group,))


def streams(stages: set[int], method: str = "breadth-first", **options: object) -> Callable[[], object]:
    options = {"recomputed": frozenset({0, 1, 2}), **options}
    return lambda: A(method, 3, 2, streamed=frozenset(stages), **options)


def skips(*given: tuple[int, int]) -> Callable[[], object]:
    return lambda: A("gpipe", 3, 2, skips=given)


def csv(text: str) -> Callable[[], object]:
    return lambda: read_torch_csv("x", text)


REFUSALS = [
    (lambda: A("gpipe", 0, 1), "ranks: expected a whole number, 1 or more, found 0: give 1 or more"),
    (lambda: A("gpipe", 1, -2), "microbatches: expected a whole number, 1 or more, found -2: give 1 or more"),
    (lambda: A("interleaved", 1, 1, 1.5), "stages_per_rank: expected a whole number, 1 or more, found 1.5"),
    (lambda: A("gpipe", 1, 1).step(-1), "schedule: minibatch: expected a whole number, 0 or more, found -1"),
    (lambda: A("gpipe", 1, 1).drain(-1), "schedule: minibatches: expected a whole number, 0 or more, found -1"),
    (lambda: A("1f1b-flsh", 2, 2), "there is no method '1f1b-flsh'. Did you mean '1f1b-flush'? Choose one of 'gpipe'"),
    (lambda: A("zzz", 2, 2), "schedule: there is no method 'zzz'. Choose one of 'gpipe', '1f1b-flush', "),
    (lambda: A("2bw", 4, 3), "schedule '2bw': 4 stages need at least 4 microbatches, got microbatches=3; with fewer"),
    (lambda: A("interleaved", 4, 6, 2), "must be a multiple of the number of ranks, 4, got microbatches=6; give"),
    (lambda: A("interleaved", 4, 3, 2), "got microbatches=3; give microbatches=4, or choose '1f1b-flush'"),
    (lambda: A("gpipe", 4, 3, 2), "a rank holds one stage, got stages_per_rank=2; give stages_per_rank=1, or choose"),
    (lambda: A("2bw", 4, 4, vertical_sync=True), "vertical_sync=True belongs to 'pipedream' only; drop it"),
    (lambda: schedule(UNEQUAL), "vertical sync needs equally many replicas of every stage, got 2-1"),
    (lambda: schedule(Plan.uniform(8, 4, "2bw", 2)), "schedule '2bw': 4 stages need"),
    (
        lambda: A("zb-v", 2, 4),
        "schedule 'zb-v': a rank holds two stages, got stages_per_rank=1; give stages_per_rank=2",
    ),
    (lambda: A.placed("zb-v", FOLDED, 4), "a schedule in a V: all stages must have equally many replicas, got 2-1-1-2"),
    (lambda: A.placed("zb-v", Placement.straight(2, 2), 4), "stage s and stage 3 - s must be on one rank"),
    (lambda: A("pipedream", 3, 3, ties=((0, 2),)), "schedule 'pipedream': stages 0, 2 share weights, and every stage"),
    (streams({0, 3}), "schedule 'breadth-first': streamed: expected stages 0 to 2, found 3; give stages of the"),
    (streams({-1}), "expected stages 0 to 2, found -1"),
    (streams({0}, places=0), "places: expected a whole number, 1 or more, found 0"),
    (streams({0, 1}, recomputed=frozenset({1})), "expected stages that recompute, found stage 0, which does not"),
    (streams({0, 1}, ties=((1, 2),)), "stage 1 shares weights with another stage, and shared weights stay"),
    (streams({0}, "pipedream"), "expected a schedule that flushes, whose stages have one version of the weights"),
    (
        lambda: A.placed("v-half", Placement(((0, 1, 2),) * 2), 2, recomputed=BOTH, streamed=BOTH),
        "streamed: expected a microbatch for each of the 3 replicas of stage 0, since backwards are split, found 2",
    ),
    (ties(0), TIE),
    (ties(2, 0), TIE),
    (ties(0, 0), TIE),
    (ties(0, 3), TIE),
    (ties(-1, 1), TIE),
    (lambda: A("pipedream", 3, 1, norms=True), "'pipedream': clip_grad_norm="),
    (lambda: A("pipedream", 3, 1, vertical_sync=True, norms=True), "choose '2bw' or a flushing"),
    (lambda: A.placed("2bw", PAIRS, 4, ties=((0, 1),), norms=True), "stage 0 shares weights and has 2 replicas"),
    (skips((0, 1)), SKIP),
    (skips((2, 0)), SKIP),
    (skips((0, 3)), SKIP),
    (skips((-1, 2)), SKIP),
    (skips((0, 2), (0, 2)), SKIP),
    (
        lambda: lower(parse_programs("0F0@0 0B0@0\n2F0@0 2B0@0"), Placement.straight(2)),  # type: ignore[arg-type]
        "rank 1: 2F0@0: expected a stage from 0 to 1, found 2: give a stage",
    ),
    (csv("0F0,0B0\n1F0,1G0"), "schedule 'x': rank 1: cannot read '1G0' of the CSV: expected actions"),
    (csv("0" * 5000 + "F0,0B0"), "rank 0: cannot read"),
    (csv("1000000000F0,0B0"), "rank 0: cannot read"),
    (csv("0F1000000000,0B0"), "rank 0: cannot read"),
    (csv("\N{ARABIC-INDIC DIGIT THREE}F0,0B0"), "rank 0: cannot read"),
    (csv("7F0,7B0"), "the stages from 0 to 7, found none of 0"),
    (lambda: torch_csv(A("2bw", 2, 4)), CSV),
    (lambda: torch_csv(A("pipedream", 2, 4)), CSV),
]


@pytest.mark.parametrize(("call", "says"), REFUSALS)
def test_refusals(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        call()

    assert says in str(caught.value)
