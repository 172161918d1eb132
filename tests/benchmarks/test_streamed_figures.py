"""The sizes behind the record of streamed plans, and what it says that a step moves."""

from dataclasses import replace

import pytest

from penstock.values import LayerProfile, Plan, Profile
from streamed_plans import MODELS, moved_bytes, profile


@pytest.mark.parametrize(("name", "weights"), [("8B", 8.03e9), ("14B", 14.8e9), ("70B", 70.6e9)])
def test_models_have_their_published_numbers_of_weights(name: str, weights: float) -> None:
    made = profile(MODELS[name], 1e12, lora=False)

    assert made.parameter_bytes / 2 == pytest.approx(weights, rel=0.01)
    packed = profile(MODELS[name], 1e12, lora=True)
    assert packed.frozen_bytes == pytest.approx(0.53 * weights, rel=0.01)
    assert packed.parameter_bytes < 0.04 * made.parameter_bytes


def test_bytes_of_a_step_by_hand() -> None:
    """Two stages of 3 bytes and one frozen byte: three fetches of 4 bytes; updates of 6 bytes of state, 3 of weights,
    and 3 of gradients come, and the first two go; so do gradients when their stage leaves.
    """
    layer = LayerProfile("", 1.0, 2.0, cut_bytes=0.0, saved_bytes=0.0, parameter_bytes=3.0, frozen_bytes=1.0)
    plan = Plan.uniform(2, 2, "breadth-first", 2, 2, recompute=True)
    plan = replace(plan, streamed=True, places=1)

    assert moved_bytes(plan, Profile((layer,) * 2, 1), 2.0) == (3 * 4 + 2 * 12, 2 * 9 + 2 * 3)
