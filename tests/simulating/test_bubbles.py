"""The bubble of a schedule with balanced stages, against the formulas of the papers."""

from dataclasses import replace
from typing import Literal

import pytest

from penstock.simulating.simulator import balanced_bubble
from penstock.values.plans import Plan, Stage, schedule


@pytest.mark.parametrize("name", ["gpipe", "1f1b-flush"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_flush_idles_for_a_round_trip(name: str, recompute: bool) -> None:
    """(p - 1) / (m + p - 1) of the time."""
    plan = Plan.uniform(4, 4, schedule=name, microbatches=8)
    found = balanced_bubble(schedule(plan), frozenset(range(4) if recompute else ()))

    # The last stage of 1f1b-flush has nothing to recompute, and waits.
    assert found == pytest.approx(3 / 11) if not (recompute and name == "1f1b-flush") else found > 3 / 11


def test_interleaving_divides_the_round_trip() -> None:
    """By the stages of a rank."""
    plan = Plan.uniform(8, 8, schedule="interleaved", microbatches=8, stages_per_rank=2)

    assert balanced_bubble(schedule(plan)) == pytest.approx((3 / 2) / (8 + 3 / 2))


@pytest.mark.parametrize("name", ["pipedream", "2bw"])
def test_asynchronous_schedules_have_none(name: str) -> None:
    assert balanced_bubble(schedule(Plan.uniform(4, 4, schedule=name, microbatches=8))) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("routing", ["split", "round-robin"])
def test_stages_of_replicas_have_as_much_to_do(routing: Literal["split", "round-robin"]) -> None:
    stages = (Stage(0, 1, (0,)), Stage(1, 4, (1, 2, 3)))
    plan = replace(Plan.uniform(4, 2, microbatches=6), stages=stages, routing=routing)
    replicated = balanced_bubble(schedule(plan))

    # Turns take three times as long, so that the pipe also takes longer to fill and to drain.
    assert replicated == pytest.approx(1 / 7) if routing == "split" else 1 / 7 < replicated < 1 / 2
