"""What ranks do that agree on a step to stop before."""

import random
import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from penstock.runtime.transport.stop_agreements import StopAgreement
from penstock.runtime.transport.store_watch import StoreWatch


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
