"""Fixtures that several test files share."""

import os
from collections.abc import Iterator

import pytest

from processes import Pool

os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Five processes for all the tests that need real ones."""
    processes = Pool(5)
    yield processes
    processes.close()
