"""Every rank captures and checks the model; an error of one ends all."""

import pytest

from support.jobs.capture_jobs import error_of, inputs_of
from support.processes import Pool


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        pytest.param("summed", id="ranks wait for each other in the forward"),
        pytest.param("joined", id="ranks wait for each other in the backward"),
    ],
)
def test_every_rank_finds_what_one_process_does(pool: Pool, kind: str) -> None:
    sizes, equal = inputs_of("plain")

    assert pool.run(2, inputs_of, kind) == [(sizes, equal)] * 2
    # What the checks find is not trivial.
    assert any(least == 2 for bounds in sizes.values() for least, _ in bounds)
    assert equal


def test_all_ranks_raise_what_each_finds(pool: Pool) -> None:
    first, last = pool.run(2, error_of, "stateful", "stateful")

    assert first.startswith("CaptureError: the trace of Stateful differs from the model in output 0")
    assert last.startswith("CaptureError: the trace of Stateful differs from the model in output 0")


@pytest.mark.parametrize("kinds", [("plain", "refused"), ("refused", "plain"), ("plain", "stateful")])
def test_an_error_on_one_rank_ends_all(pool: Pool, kinds: tuple[str, str]) -> None:
    found = pool.run(2, error_of, *kinds)
    failed = next(rank for rank, kind in enumerate(kinds) if kind != "plain")

    assert found[failed].startswith("CaptureError: ")
    assert found[1 - failed].startswith(f"CaptureError: rank {failed}, while it ")


def test_an_error_of_the_model_in_a_check_ends_all(pool: Pool) -> None:
    first, last = pool.run(2, error_of, "failing", "plain")

    assert first == "its own: no gradients here"
    assert last.startswith("TransportError: rank 0 failed while it captured the model")
    assert "no gradients here" in last
