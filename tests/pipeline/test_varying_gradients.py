"""Data may decide which values that cross a cut have a gradient, and two processes have the numbers of one."""

import pytest
import torch

from support.jobs import varying_jobs as jobs
from support.jobs.varying_jobs import VaryingRun
from support.processes import Pool

KINDS = ("zeros", "zeros at first", "detached", "unread", "unread at first", "without gradient", "scaled")
RUNS = [
    *(VaryingRun(kind) for kind in KINDS),
    *(VaryingRun(kind, shares_memory=False) for kind in KINDS),
    *(VaryingRun(kind, schedule) for kind in KINDS[::3] for schedule in ("zb-h1", "2bw", "gpipe")),
    *(VaryingRun(kind, wire_dtype=torch.bfloat16) for kind in KINDS[1::3]),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_data_may_decide_which_gradients_cross_a_cut(pool: Pool, run: VaryingRun) -> None:
    losses, weights = jobs.reference(run)
    for count in (1, 2):
        answers = pool.run(count, jobs.train, run)
        found = {name: weight for _, state in answers for name, weight in state.items()}
        assert [each for each, _ in answers] == [losses] * count
        assert found.keys() == weights.keys()
        for name, weight in weights.items():
            assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", jobs.GRADIENT_LATER)
def test_a_gradient_that_the_sample_does_not_show_is_refused(
    pool: Pool, kind: str, wire_dtype: torch.dtype | None
) -> None:
    answers = pool.run(2, jobs.refused, VaryingRun(kind, wire_dtype=wire_dtype, row=0))
    assert any("with a gradient" in text and "pass a sample= for which they have one" in text for text in answers)
    if wire_dtype is None:
        # In one process nothing travels as bytes, and nothing must be agreed on.
        assert pool.run(1, jobs.refused, VaryingRun(kind, row=0)) == [""]


@pytest.mark.parametrize("count", [1, 2])
def test_a_value_that_no_parameter_reaches_requires_no_gradient_behind_a_cut(pool: Pool, count: int) -> None:
    assert [each for each in pool.run(count, jobs.selected, None) if each] == [[[True, False]] * 4]
