"""Random orders with streamed stages: proved, spoiled and simulated, and judged by programs that share no code."""

from random import Random

import pytest

from penstock.errors import ScheduleError
from penstock.scheduling.verification.verifier import verify, verify_programs
from penstock.simulating import evaluate
from support.streamed_orders import OPTIMIZER, Clock, Sizes, is_lawful, random_streamed, spoiled


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(200))
def test_laws_seconds_and_bytes_are_those_of_another_program(seed: int) -> None:
    draw = Random(f"streamed {seed}")
    broken = 0
    for _ in range(50):
        made = random_streamed(draw)
        verify(made)
        steps = [made.step(number) for number in range(2)]
        assert is_lawful(steps, made)

        rank = draw.randrange(made.ranks)
        rows = [*steps[0]]
        rows[rank] = spoiled(draw, rows[rank])
        lawful = is_lawful([tuple(rows)], made)
        broken += not lawful
        try:
            verify_programs(tuple(rows), made, 1)
        except ScheduleError:
            assert not lawful, rows
        else:
            assert lawful, rows

        sizes = Sizes.drawn(draw, made.stages)
        clock = Clock(made, steps[0], sizes)
        found = evaluate(*sizes.problem(made), optimizer_copies=OPTIMIZER)
        assert found.minibatch_seconds == max(clock.now), (made, sizes)
        assert list(found.peak_bytes) == [clock.peak(rank) for rank in range(made.ranks)], (made, sizes)
        assert found.bottleneck_seconds * made.microbatches <= found.minibatch_seconds * (1 + 1e-12)
    assert broken > 15
