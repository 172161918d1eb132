"""Random orders with offloads, versions, replicas and skips: wrong ones are refused, and the others are right.

With ``--all-cases`` a hundred thousand are drawn, and a thousand of them are run beside the oracle.
"""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock import Plan
from penstock.errors import ScheduleError
from penstock.scheduling.actions import Offload
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.verification.verifier import enough_minibatches, verify
from penstock.values.plans import schedule
from support.random_orders import found_order, is_lawful, named_order, with_offloads
from support.training import LAYERS, PAIRED, Case, assert_equal, run_pipeline, run_reference, stages_on_a_rank

DRAWS = [range(100), range(100, 1000), *(range(first, first + 1000) for first in range(1000, 100_000, 1000))]
RUNS = [range(2), range(2, 50), *(range(first, first + 50) for first in range(50, 1000, 50))]
"""Each a case, of which the suite runs the first."""
TRAINED = ("gpipe", "1f1b-flush", "spp", "zb-h1", "zb-v", "v-half", "v-min", "pipedream", "vertical", "2bw")


def strew(made: Schedule, draw: Random, faults: float) -> Schedule:
    return replace(made, method=with_offloads(made.definition, draw.getrandbits(32), draw.choice((0.3, 1.0)), faults))


def judge(made: Schedule, minibatches: int) -> bool:
    """Whether `made` is proved, as it is if its offloads are lawful and only then."""
    lawful = is_lawful(made, minibatches)
    try:
        verify(made, minibatches)
    except ScheduleError as error:
        assert not lawful, f"{made.definition.programs or made}: {error}"
        assert "offload" in str(error) or "reload" in str(error) or "a step carries" in str(error), error
    else:
        assert lawful, made.definition.programs or made
    return lawful


@pytest.mark.sampled(1)
@pytest.mark.parametrize("numbers", DRAWS, ids=str)
def test_what_breaks_no_law_is_proved(numbers: range) -> None:
    for number in numbers:
        draw = Random(number)
        made = found_order(draw, 4, 8) if number % 2 else named_order(draw, 4, 3, 8)
        made = strew(made, draw, draw.choice((0.0, 0.1)))
        judge(made, draw.randint(1, 2 if made.flushes else enough_minibatches(made)))


def drawn_run(draw: Random) -> tuple[Case, dict[str, Any]]:
    """A training and the options of its pipeline: what it offloads, and what it recomputes of the rest."""
    subject, microbatches = draw.choice(("layered", "normalized", "skipping")), draw.randint(3, 6)
    if draw.random() < 0.5:
        made = found_order(draw, 3, 6, LAYERS)
        case = Case(subject, "gpipe", made.ranks, made.microbatches, "adamw")
        stages, per_rank = made.stages, made.stages_per_rank
        plan = Plan.uniform(LAYERS, stages, made.definition, made.microbatches, stages_per_rank=per_rank)
    else:
        # A slice of one sample is too small for normalization.
        name, split = draw.choice(TRAINED), subject == "layered" and draw.random() < 0.5
        replicas: tuple[int, ...] = ()
        if subject != "skipping" and name not in PAIRED and draw.random() < 0.5:
            replicas = draw.choice(((2, 1), (1, 2), (2, 2)))
        ranks = len(replicas) or draw.randint(2, 4)
        taken = max(microbatches, ranks, sum(replicas))
        per_rank = stages_on_a_rank(name)
        case = Case(subject, name, ranks, taken, stages_per_rank=per_rank, replicas=replicas, split=split)
        plan = case.options["plan"]
    if draw.random() < 0.8:
        method = with_offloads(plan.definition, draw.getrandbits(32), draw.choice((0.3, 1.0)))
        plan = replace(plan, schedule=method)
    away = {action.stage for row in schedule(plan).program(8) for action in row if isinstance(action, Offload)}
    again = {stage for stage in range(len(plan.stages)) if stage not in away and draw.random() < 0.5}
    return case, {"plan": plan, "recompute": again or None}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("numbers", RUNS, ids=str)
def test_random_orders_train_as_the_oracle_does(numbers: range, tmp_path: Path) -> None:
    for number in numbers:
        case, options = drawn_run(Random(f"run {number}"))
        actual = run_pipeline(case, offload_to=tmp_path, check="off", **options)
        assert_equal(run_reference(case, plan=options["plan"]), actual)
