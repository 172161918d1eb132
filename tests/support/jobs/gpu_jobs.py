"""What the tests of a GPU have computed: by themselves, in processes of the pool, and on a CPU where there is none."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

import penstock
from support.fork_server import ForkServer, finish
from support.outcome_comparisons import on_host
from support.paths import SCRIPTS
from support.training import Case, Outcome, run_pipeline

LIMIT_SECONDS = 60
"""A training over NCCL may take so long. Its processes end themselves ten seconds before and say where they were."""
NCCL_SCRIPT = SCRIPTS / "nccl_script.py"


def run_deterministically(tried: Case) -> Outcome:
    """The run by `Pipeline`, with PyTorch's deterministic algorithms, in a process of the pool."""
    torch.use_deterministic_algorithms(True)
    try:
        return on_host(run_pipeline(tried))
    finally:
        torch.use_deterministic_algorithms(False)


def run_compiled_aside(tried: Case, compile: Mapping[str, Any]) -> Outcome:
    """The run with `compile`, in a process of the pool."""
    return on_host(run_pipeline(tried, compile=compile))


def run_without_waiting(tried: Case, options: dict[str, Any]) -> None:
    """After six steps, of which the first four compare batches and replicas on the host, PyTorch raises an error where
    a step would wait for the device.
    """
    # To copy them to the device waits for it.
    batches = tried.batches[:2]
    pipe = penstock.Pipeline(tried.build(), **tried.options, **options)
    losses = [pipe.step(x, y).loss for x, y in batches * 3]
    float(losses[-1])
    with refusing_to_wait(torch.device(tried.device)):
        for x, y in batches:
            losses.append(pipe.step(x, y).loss)
    assert all(float(loss) > 0 for loss in losses)
    pipe.close()


@contextmanager
def refusing_to_wait(device: torch.device) -> Iterator[None]:
    """A context in which PyTorch raises an error where the host would wait for `device`. It never waits for a CPU."""
    if device.type != "cuda":
        yield
        return
    try:
        # The mode is set, and then comes the warning: if that is an error, the mode must be set back here.
        _set_mode("error")
        yield
    finally:
        _set_mode("default")


def allow_waiting() -> None:
    """As it is at first, whatever a test has left behind."""
    if torch.cuda.is_initialized():
        _set_mode("default")


def _set_mode(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
        torch.cuda.set_sync_debug_mode(mode)


def answers_over_nccl(
    fork_server: ForkServer, schedule: str, replicas: str, cards: str, seconds: float
) -> list[tuple[int | None, str]]:
    """Exit code and standard error of each process of the script that trains over NCCL."""
    ranks = sum(int(count) for count in replicas.split("-"))
    arguments = [str(NCCL_SCRIPT), schedule, replicas, cards, str(seconds - 10)]
    return finish(fork_server.start_ranks(arguments, ranks), seconds)
