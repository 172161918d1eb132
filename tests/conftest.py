"""Fixtures, markers and settings that all tests share."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from support.fork_server import ForkServer
from support.processes import COLLECTIONS, Pool

os.environ["OMP_NUM_THREADS"] = "1"
# What is imported and collected is no garbage, and there is much of it to look through.
gc.set_threshold(*COLLECTIONS)
# Compiled once, and not by every worker and every process that a test starts.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Without it cuBLAS refuses PyTorch's deterministic algorithms, which the tests of GPUs ask for.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# A linear layer with a bias would go through cublasLt on a GPU. That chooses its kernel by the alignment of what it is
# given, among others, and so may take another one for a part of a batch than for a tensor of its own: another last bit.
os.environ.setdefault("DISABLE_ADDMM_CUDA_LT", "1")
# A job in the background of a shell ignores Ctrl-C, and so would the processes that the tests send it to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
pytest_plugins = ["support.deadlines", "support.sampled_cases"]
# An assertion that fails in these modules prints its values, like one in a test.
pytest.register_assert_rewrite("support.outcome_comparisons", "support.training")
# On a busy machine the generation of inputs is slow too, which is no fault of the code.
# The suite draws the same inputs every time, so that no change fails for a draw that has nothing to do with it;
# ./scripts/fuzz draws anew.
settings.register_profile(
    "suite", derandomize=True, max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "fuzz", settings.get_profile("suite"), derandomize=False, max_examples=100, print_blob=True, database=None
)
settings.load_profile(os.environ.get("PENSTOCK_DRAWS", "suite"))
PROCESS_FIXTURES = frozenset({"fork_server", "pool", "wheel"})


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadgroup``, keeps tests together that share an expensive fixture."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from support.xdist_groups import GroupScheduling  # pytest-xdist may not be installed

    return GroupScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that use a fixture which starts processes; tests that start their own are marked by hand."""
    for item in items:
        if isinstance(item, pytest.Function) and PROCESS_FIXTURES.intersection(item.fixturenames):
            item.add_marker(pytest.mark.processes)


def pytest_collection_finish() -> None:
    """Keeps the garbage collector from traversing all that is imported by now, which takes half a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Five processes that all tests share which need a process group."""
    processes = Pool(5, request.config.getoption("pool_seconds"))
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    process = ForkServer()
    yield process
    process.close()
