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
