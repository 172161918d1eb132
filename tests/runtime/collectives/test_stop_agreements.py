"""All ranks stop before the same step, whichever of them is asked and however far they are apart."""

import random
import time

import pytest
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import PrefixStore

from penstock.errors import TransportError
from penstock.runtime.collectives.stop_agreements import StopAgreement
from penstock.runtime.collectives.store_watch import StoreWatch
from support.processes import Pool


def stop_at_random(seed: int, steps: int, asked: dict[int, int], leaves: int | None = None) -> tuple[int, int]:
    """Makes up to `steps` steps, each as long as drawn, at most three ahead of the other ranks.

    `asked`: by rank, the step in which it is asked to stop, for the reason 10 + rank. The rank `leaves` closes after
    its third step. Returns the step that was not begun, and why.
    """
    rank, ranks, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert world is not None
    store, draw = PrefixStore(f"stops {seed}", world.get_group_store()), random.Random(seed * 100 + rank)
    watch = StoreWatch(store, rank)
    agreement = StopAgreement(watch, rank, ranks, 0)
    pace = draw.choice([0.0, 0.01, 0.05])
    try:
        for step in range(steps):
            if rank == leaves and step == 3:
                return step, 0
            reason = agreement.begin(step, lambda: None, 60.0)
            if reason:
                return step, reason
            store.set(f"made {step}/{rank}", "")
            if step >= 3:
                store.wait([f"made {step - 3}/{other}" for other in range(ranks) if other != leaves])
            if asked.get(rank) == step:
                agreement.ask(10 + rank)
            time.sleep(draw.uniform(0, pace))
        return steps, 0
    finally:
        agreement.close()
        watch.stop()
        # The store may live in a process that would leave.
        dist.barrier()


@pytest.mark.parametrize("seed", range(3))
def test_ranks_of_different_pace_stop_before_the_same_step(pool: Pool, seed: int) -> None:
    answers = pool.run(4, stop_at_random, seed, 100_000, {seed % 4: 5 * seed})

    assert len(set(answers)) == 1, "all have the same step and reason"
    step, reason = answers[0]
    assert reason == 10 + seed % 4
    assert step > 5 * seed


def test_ranks_that_are_asked_at_once_stop_for_one_reason(pool: Pool) -> None:
    answers = pool.run(3, stop_at_random, 7, 100_000, {0: 0, 1: 0, 2: 1})

    assert len(set(answers)) == 1
    assert answers[0][1] in (10, 11, 12)


def test_without_a_reason_all_steps_are_made(pool: Pool) -> None:
    assert pool.run(3, stop_at_random, 8, 40, {}) == [(40, 0)] * 3


def test_a_rank_that_has_left_keeps_none_of_the_others_waiting(pool: Pool) -> None:
    first, left, third = pool.run(3, stop_at_random, 9, 100_000, {0: 20}, 1)

    assert left == (3, 0)
    assert first == third
    assert first[1] == 10


def test_a_single_process_stops_before_its_next_step() -> None:
    agreement = StopAgreement(None, 0, 1, steps=4)
    assert agreement.begin(4, lambda: None, 1.0) == 0
    agreement.ask(15)

    assert agreement.begin(5, lambda: None, 1.0) == 15


def test_a_rank_that_does_not_answer_ends_the_wait() -> None:
    watch = StoreWatch(HashStore(), 0)
    agreement = StopAgreement(watch, 0, 2, steps=0)
    agreement.ask(15)
    step = 0
    try:
        with pytest.raises(TransportError, match=r"expected an answer of every rank within 0\.3 s"):
            while True:
                assert agreement.begin(step, lambda: None, 0.3) == 0
                step += 1
    finally:
        watch.stop()
