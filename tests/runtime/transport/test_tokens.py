"""Processes of one run have one token, prove it to each other, and never write it anywhere."""

import pytest

from support.jobs.trust_jobs import join_with_tokens, list_stored_texts
from support.processes import Pool

LONG = "a token of enough characters"


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([LONG, LONG[::-1]], ["rank(s) 1 and rank 0 have different tokens", "rank(s) 0 and rank 1"]),
        ([LONG, None], ["found one that is set on rank 0", "found none on rank 1"]),
        ([None, LONG], ["found none on rank 0", "found one that is set on rank 1"]),
        (
            [LONG, "short"],
            ["rank(s) 1 and rank 0 have different tokens", "PENSTOCK_TOKEN on rank 1: expected at least 16 characters"],
        ),
        ([None, "short"], ["found none on rank 0", "rank 1: expected at least 16 characters, found 5"]),
        (["", ""], ["rank 0: expected at least 16 characters, found 0", "rank 1: expected at least 16"]),
    ],
)
def test_another_token_is_refused_on_every_rank(pool: Pool, tokens: list[str | None], said: list[str]) -> None:
    for expected, found in zip(said, pool.run(2, join_with_tokens, tokens), strict=True):
        assert found.startswith("TransportError: ")
        assert expected in found
        for token in tokens:
            assert not token or token not in found, "an error tells no token"


def test_ranks_with_one_token_join(pool: Pool) -> None:
    assert pool.run(2, join_with_tokens, [LONG, LONG]) == ["joined"] * 2


def test_a_token_of_the_environment_is_written_nowhere(pool: Pool) -> None:
    for texts in pool.run(2, list_stored_texts, LONG):
        assert len(texts) > 0
        assert not any(LONG in text or "token" in text for text in texts)
