"""The bytes that a process has resident: those of the microbatches in flight, however many there are in a minibatch."""

import pytest

from penstock.scheduling.schedules import Schedule
from support.fork_server import ForkServer
from support.paths import SCRIPTS

SCRIPT = SCRIPTS / "resident_script.py"
MESSAGE_BYTES = 1024 * 256 * 4
"""Of the activations, or of their gradients, between the two stages of the script."""


def measure(fork_server: ForkServer, schedule: str, microbatches: int) -> list[tuple[int, int]]:
    """By rank of two: the peak, and the gradients of weights."""
    processes = fork_server.start_ranks([str(SCRIPT), schedule, str(microbatches)], 2)
    outputs = [process.communicate()[0].split() for process in processes]
    return [(int(peak), int(gradients)) for peak, gradients in outputs]


@pytest.mark.slow
def test_a_flush_holds_what_is_in_flight_and_not_the_minibatch(fork_server: ForkServer) -> None:
    single, double = (measure(fork_server, "gpipe", microbatches) for microbatches in (1, 2))
    made = Schedule("1f1b-flush", 2, 16)
    for rank, (peak, gradients) in enumerate(measure(fork_server, "1f1b-flush", 16)):
        one = double[rank][0] - single[rank][0]
        # From the second microbatch on there are gradients beside the activations.
        expected = single[rank][0] + (made.in_flight(rank) - 1) * one + gradients

        # On a busy machine the message of a microbatch may come before the microbatch is due.
        assert 0.9 * expected <= peak <= 1.1 * expected + MESSAGE_BYTES
