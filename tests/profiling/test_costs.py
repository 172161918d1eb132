"""What messages and actions cost the ranks: the arithmetic, and what is measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.profiling.action_costs import action_seconds, fit_costs, measure_action_seconds
from penstock.values.link_tables import MessageCosts

seconds = st.floats(0, 1)


@given(seconds, st.floats(0, 1e-6), st.integers(9, 2**20))
def test_the_fit_gives_back_the_costs_that_made_the_seconds(each, per_byte, size):
    """An exchange is two messages: one that was sent and one that was received."""
    large = [2 * (each + (size - 8) * per_byte)] * 3
    found = fit_costs((8, [2 * each] * 3), (size, large))

    assert found.seconds == pytest.approx(each)
    assert found.seconds_per_byte == pytest.approx(per_byte, abs=1e-15)


def test_costs_are_never_negative():
    """Noise can make a rank faster while messages are on their way."""
    assert fit_costs((8, [-1.0]), (1024, [-2.0])) == MessageCosts()
    assert fit_costs((8, [4.0]), (1024, [1.0])) == MessageCosts(2.0)


def test_an_action_takes_what_is_left_of_a_step_without_its_layers():
    """16 actions: eight microbatches more, of 3 s in a plain loop of all; the median of each series counts."""
    assert action_seconds([2.0, 9.0, 2.0], [6.0, 6.0, 0.0], [3.0, 3.0, 70.0]) == ((6.0 - 2.0 - 3.0) / 16, 1.0)
    assert action_seconds([1.0], [2.0], [3.0]) == (0.0, 0.75)
    assert action_seconds([1.0], [9.0], [3.0]) == (5 / 16, 0.0)


def test_an_action_is_measured_in_a_worker():
    action, step = measure_action_seconds()
    assert 0 <= action < 0.1 and 0 <= step < 1
