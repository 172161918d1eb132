"""Recomputations: where lowering puts them, and the laws, each broken once on purpose."""

from dataclasses import replace
from itertools import pairwise

import pytest

from penstock.scheduling.actions import Forward, InputGradients, Recompute
from penstock.scheduling.orders import METHODS
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.verification.verifier import enough_minibatches, verify
from penstock.values.plans import Plan, schedule

FIRST = Schedule("1f1b-flush", 2, 2, recomputed=frozenset({0}))


def test_a_recomputation_is_before_the_receive_of_its_backward() -> None:
    assert str(FIRST).splitlines()[1:] == [
        "rank 0: 0F0@0 0S0>1 0F1@0 0S1>1 0C0@0 0R0<1 0B0@0 0C1@0 0R1<1 0B1@0 0U1<0",
        "rank 1: 1R0<0 1F0@0 1B0@0 1S0>0 1R1<0 1F1@0 1B1@0 1S1>0 1U1<0",
    ]


@pytest.mark.parametrize("method", [method for method in METHODS if method.name != "forward-only"], ids=str)
def test_all_but_what_directly_follows_its_forward_is_recomputed(method: object) -> None:
    per_rank = 2 if method.layout.has_several else 1  # type: ignore[attr-defined]
    plan = Plan.uniform(3 * per_rank, 3 * per_rank, method, 6, per_rank, recompute=True)  # type: ignore[arg-type]
    made = schedule(plan)
    verify(made)
    minibatches = enough_minibatches(made)
    for rank, (row, bare) in enumerate(
        zip(made.program(minibatches), replace(made, recomputed=frozenset()).program(minibatches), strict=True)
    ):
        assert [action for action in row if not isinstance(action, Recompute)] == list(bare), rank
        computed = [action for action in row if isinstance(action, Forward | InputGradients | Recompute)]
        for before, action in pairwise(computed):
            if isinstance(action, InputGradients):
                same = (before.stage, before.microbatch) == (action.stage, action.microbatch)
                assert same, f"{action} comes after {before}"
