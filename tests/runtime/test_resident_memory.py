"""The bytes that a process has resident: those of the microbatches in flight, however many there are in a minibatch."""

import pytest

from penstock.scheduling.schedules import Schedule
from processes import Pool
from resident_jobs import GRADIENT_BYTES, resident_peak


def test_a_flush_holds_what_is_in_flight_and_not_the_minibatch(pool: Pool) -> None:
    single, double = (pool.run(2, resident_peak, "gpipe", microbatches) for microbatches in (1, 2))
    many = pool.run(2, resident_peak, "1f1b-flush", 16)
    made = Schedule("1f1b-flush", 2, 16)
    for rank, peak in enumerate(many):
        one = double[rank] - single[rank]
        # From the second microbatch on there are gradients beside the activations.
        expected = single[rank] + (made.in_flight(rank) - 1) * one + GRADIENT_BYTES

        assert peak == pytest.approx(expected, rel=0.1)
