"""Pipelines that are opened and closed in one process leave nothing behind: no descriptor, thread, memory or key."""

import os

import pytest

from support.jobs.trust_jobs import open_and_close
from support.processes import Pool

PIPELINES = int(os.environ.get("PENSTOCK_TEST_PIPELINES", "10"))
"""How many are opened. Two hundred take two minutes."""
BOTH = pytest.mark.parametrize("shared", [True, False], ids=["shared-memory", "gloo"])


@BOTH
@pytest.mark.parametrize("end", ["closed", "in flight", "failed", "dropped"])
def test_pipelines_leave_nothing_behind(pool: Pool, shared: bool, end: str) -> None:
    for before, after in pool.run(2, open_and_close, PIPELINES // (2 if end == "failed" else 1), shared, end, False):
        assert after == before


def test_replicas_leave_nothing_behind(pool: Pool) -> None:
    for before, after in pool.run(2, open_and_close, PIPELINES, False, "closed", True):
        assert after == before


@pytest.mark.parametrize("end", ["closed", "in flight", "dropped"])
def test_pipelines_of_one_process_leave_nothing_behind(end: str) -> None:
    before, after = open_and_close(PIPELINES, True, end, False)

    assert after == before
