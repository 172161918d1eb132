"""One rank checks for all that captured the same chain; others check their own; an error of one ends all."""

import pytest

from penstock.capturing.chain_digests import digest_of
from penstock.capturing.doors import capture
from support.jobs.capture_jobs import KINDS, check_with_others, error_of, find_alone, sample
from support.processes import Pool


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("plain", 2),
        ("plain", 3),
        pytest.param("drawing", 2, id="a generator of its own, of which checks draw from copies"),
    ],
)
def test_the_first_rank_does_what_one_process_would_do(pool: Pool, kind: str, ranks: int) -> None:
    alone = find_alone(kind)
    found = pool.run(ranks, check_with_others, *[kind] * ranks)

    assert [(each.sizes, each.equal) for each in found] == [(alone.sizes, alone.equal)] * ranks
    assert [each.runs for each in found] == [alone.runs] + [0] * (ranks - 1)
    # What the first rank finds for the others is not trivial.
    assert any(least == 2 for bounds in alone.sizes.values() for least, _ in bounds)
    assert alone.equal


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(("plain", "other number"), id="a number in the trace"),
        pytest.param(("summed", "summed"), id="ranks wait for each other in the forward"),
        pytest.param(("joined", "joined"), id="ranks wait for each other in the backward"),
    ],
)
def test_ranks_check_their_own(pool: Pool, kinds: tuple[str, str]) -> None:
    alone = find_alone("plain")

    for found in pool.run(2, check_with_others, *kinds):
        assert (found.runs, found.sizes, found.equal) == (alone.runs, alone.sizes, alone.equal)


def test_all_ranks_raise_what_one_finds(pool: Pool) -> None:
    first, last = pool.run(2, error_of, "stateful", "stateful")

    assert first.startswith("CaptureError: the trace of Stateful differs from the model in output 0")
    assert last == first


@pytest.mark.parametrize("kinds", [("plain", "refused"), ("refused", "plain"), ("plain", "stateful")])
def test_an_error_on_one_rank_ends_all(pool: Pool, kinds: tuple[str, str]) -> None:
    found = pool.run(2, error_of, *kinds)
    failed = next(rank for rank, kind in enumerate(kinds) if kind != "plain")

    assert found[failed].startswith("CaptureError: ")
    assert found[1 - failed].startswith(f"CaptureError: rank {failed}, while it ")


def test_an_error_of_the_model_in_a_check_ends_all(pool: Pool) -> None:
    first, last = pool.run(2, error_of, "failing", "failing")

    assert first == "its own: no gradients here"
    assert last.startswith("TransportError: rank 0 failed while it checked the captured model")
    assert "no gradients here" in last


def test_digests_are_those_of_what_was_captured() -> None:
    captured = digest_of(capture(KINDS["plain"](), sample()))

    assert captured == digest_of(capture(KINDS["plain"](), sample()))
    assert captured != digest_of(capture(KINDS["other number"](), sample()))
    assert captured != digest_of(capture(KINDS["plain"]().double(), tuple(t.double() for t in sample())))
    assert captured != digest_of(capture(KINDS["plain"]().eval(), sample()))
