"""Processes of one run have one token, prove it to each other, and never write it anywhere."""

import threading
from collections.abc import Sequence

import pytest
from torch.distributed import HashStore

from penstock.runtime.transport.run_keys import TOKEN, RunKey, agree_on_key
from support.jobs.trust_jobs import join_with_tokens, list_stored_texts
from support.processes import Pool

LONG = "a token of enough characters"


def agree(ranks: int) -> list[RunKey]:
    """What `ranks` threads agree on."""
    barrier, store = threading.Barrier(ranks), HashStore()
    proofs, keys = [""] * ranks, dict[int, RunKey]()

    def run(rank: int) -> None:
        def gather(own: str) -> Sequence[str]:
            proofs[rank] = own
            barrier.wait()
            gathered = list(proofs)
            barrier.wait()
            return gathered

        keys[rank] = agree_on_key(rank, gather, lambda text: store.compare_set("token", "", text))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [keys[rank] for rank in range(ranks)]


@pytest.mark.parametrize("token", [None, LONG])
def test_ranks_agree_on_one_key(token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    if token is not None:
        monkeypatch.setenv(TOKEN, token)
    one, other = agree(2)

    assert other.proves(one.proof(b"here", b"text"), b"here", b"text")
    assert not other.proves(one.proof(b"here", b"text"), b"there", b"text")
    assert not other.derived("something else").proves(one.proof(b"here", b"text"), b"here", b"text")


def test_parts_of_a_proof_cannot_be_shifted() -> None:
    key = RunKey(b"secret")

    assert key.proof(b"ab", b"c") != key.proof(b"a", b"bc")
    assert key.proves(key.proof(b"ab", b"c"), b"ab", b"c")


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (
            [LONG, "another token of that length"],
            ["rank(s) 1 and rank 0 have different tokens", "rank(s) 0 and rank 1"],
        ),
        ([LONG, None], ["found one that is set on rank 0", "found none on rank 1"]),
        ([None, LONG], ["found none on rank 0", "found one that is set on rank 1"]),
        (
            [LONG, "short"],
            ["rank(s) 1 and rank 0 have different tokens", "PENSTOCK_TOKEN on rank 1: expected at least 16 characters"],
        ),
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
    for texts in pool.run(2, list_stored_texts, None):
        assert any("token" in text for text in texts)
