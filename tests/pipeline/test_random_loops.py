"""Loops of random habits train and evaluate with the numbers of a plain loop, or are refused or warned of."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings

import penstock
from support.random_loops import DrawnLoop, drawn_loops


def outcome_of(loop: DrawnLoop) -> str:
    """What became of a loop: trained, refused, warned of, or impossible without a pipeline, too."""
    try:
        found, warned = loop.train_in_stages()
    except penstock.PenstockError:
        return "refused"
    try:
        expected = loop.train_plainly()
    except RuntimeError:
        return "impossible"
    if any("first two microbatches" in text for text in warned):
        return "warned"
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    assert found.evaluations == pytest.approx(expected.evaluations, rel=1e-12)
    for actual, wanted in zip(found.predictions, expected.predictions, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-11, atol=1e-13)
    for name, tensor in expected.state.items():
        torch.testing.assert_close(found.state[name], tensor, rtol=1e-11, atol=1e-13)
    return "trained"


@pytest.mark.hypothesis
def test_random_loops_train_with_the_numbers_of_a_plain_loop_or_are_refused() -> None:
    outcomes: Counter[str] = Counter()

    @settings(max_examples=80)
    @given(drawn_loops())
    def train(loop: DrawnLoop) -> None:
        outcomes[outcome_of(loop)] += 1

    train()

    # A generator whose loops are refused would test nothing.
    assert outcomes["trained"] >= outcomes.total() / 3, outcomes
