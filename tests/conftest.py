"""Fixtures that several test files share."""

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from support.nursery import Nursery
from support.processes import Pool

os.environ["OMP_NUM_THREADS"] = "1"
# Without it cuBLAS refuses PyTorch's deterministic algorithms, which the tests of GPUs ask for.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# A linear layer with a bias would go through cublasLt on a GPU. That chooses its kernel by the alignment of what it is
# given, among others, and so may take another one for a part of a batch than for a tensor of its own: another last bit.
os.environ.setdefault("DISABLE_ADDMM_CUDA_LT", "1")
pytest_plugins = ["support.deadlines"]
# Their comparisons of outcomes say what differs, as the tests themselves do.
pytest.register_assert_rewrite("support.bits", "support.training")
# A busy machine is slow to generate inputs, too; that says nothing of the code.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadgroup`` keeps together what shares something expensive."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from support.groups import GroupScheduling  # pytest-xdist need not be there

    return GroupScheduling(config, log)


def pytest_collection_finish() -> None:
    """What is imported by now stays; a collection of garbage that looks through all of it takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Five processes for all the tests that need real ones."""
    processes = Pool(5, request.config.getoption("pool_seconds"))
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Starts the scripts that must be processes of their own."""
    process = Nursery()
    yield process
    process.close()
